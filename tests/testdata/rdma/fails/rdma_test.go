package fails

import "testing"

func TestFails(t *testing.T) { t.Error("as it should") }
