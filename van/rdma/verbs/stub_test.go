//go:build !linux || !cgo || nordma

package verbs

import (
	"errors"
	"strings"
	"testing"
)

func TestStub(t *testing.T) {
	s, err := Load(Options{})
	if s != nil || !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "USE_RDMA=0") {
		t.Fatalf("Load = %v, %v", s, err)
	}
}
