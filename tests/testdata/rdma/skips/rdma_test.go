package skips

import "testing"

func TestSkips(t *testing.T) { t.Skip("no device") }
