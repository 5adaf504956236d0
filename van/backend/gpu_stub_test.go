//go:build !cuda

package backend

import (
	"slices"
	"testing"
)

func TestNewSaysWhatIsMissing(t *testing.T) {
	_, err := New("gpu", 0)
	wantError(t, err, ErrUnavailable, "GPU", "built without CUDA", "make af USE_CUDA=1")
	_, err = GPUs()
	wantError(t, err, ErrUnavailable, "built without CUDA")
	if slices.Contains(Names(), "GPU") {
		t.Error("GPU is listed as a backend of this build")
	}
}
