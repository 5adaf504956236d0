package local

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestReplyTexts: both texts of a reply arrive complete, and are not mixed up. They are the reasons why a peer
// refuses, why it does not read memory, and why it does not copy from a device.
func TestReplyTexts(t *testing.T) {
	worker, _ := pair(t)
	dialer := dialer{self: &endpoint{}, peers: worker.peers, out: &worker.tx, log: worker.dialer.log}
	answer := func(r reply) (*outLink, error) {
		file, err := newRingFile(worker.tx.memory)
		if err != nil {
			t.Fatal(err)
		}
		seg, err := mapSegment(file.fd)
		if err != nil {
			t.Fatal(err)
		}
		near, far := looseEnds(t)
		b := r.encode()
		if r.verdict != verdictNo {
			b[5] |= knowsPads
		}
		if _, _, err := far.WriteMsgUnix(b, unix.UnixRights(worker.own.bell.fd), nil); err != nil {
			t.Fatal(err)
		}
		l, err := dialer.finish(near, new(outPeer), seg, file)
		if err != nil {
			file.close()
			seg.unmap()
		}
		return l, err
	}
	long := strings.Repeat("x", maxWhy)
	for _, why := range []string{"no files are left", "", long} {
		for _, noDevice := range []string{"", "no", "peer access is not to be had", long} {
			_, err := answer(reply{verdict: verdictNo, why: why, noDevice: noDevice})
			if want := "the peer refuses the link: " + why; !errors.Is(err, errRefused) || err.Error() != want {
				t.Errorf("why %q, no device %q: error %q, want %q", why, noDevice, err, want)
			}
		}
	}
	dialer.self.device = &device{}
	l, err := answer(reply{verdict: verdictStream, why: "ptrace is forbidden", noDevice: "peer access is not to be had"})
	if err != nil {
		t.Fatal(err)
	}
	l.close(true)
	worker.says(`"large values"="ring only: ptrace is forbidden"`)
	worker.says(`"through host memory: peer access is not to be had"`)
}
