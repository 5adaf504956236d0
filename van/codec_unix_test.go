//go:build unix && (amd64 || arm64)

package van

import (
	"syscall"
	"testing"
)

// The body is address space that faults on every access: checking a length must
// not read the bytes.
func TestValidateHugeBody(t *testing.T) {
	body, err := syscall.Mmap(-1, 0, 1<<31, syscall.PROT_NONE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := syscall.Munmap(body); err != nil {
			t.Error(err)
		}
	}()
	var m Meta
	m.Reset()
	m.Body = body
	wantInvalid(t, m.Validate(), "body_size")
	if _, err := m.AppendTo(nil); err == nil {
		t.Error("2 GiB of body were encoded")
	}
	m.Body = body[:len(body)-1]
	wantInvalid(t, m.Validate(), "")
}
