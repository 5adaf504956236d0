package local

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"

	"github.com/stepaf/stepaf-go/van"
)

// token is van.NodeExtension.Local of a node that shares memory. The zero
// token is that of a node that cannot be reached here.
//
//	0  u32      version      4  u8[8]   host        20  u32      user id
//	                        12  u8[8]   namespaces  24  u8[16]   name
type token struct {
	host  [8]byte // of the boot id
	space [8]byte // of the network and process namespaces
	uid   uint32
	name  [16]byte // random; names the socket
}

const (
	tokenVersion = 3
	tokenLen     = 40
)

// newToken returns a token of this process with a random name.
func newToken() (token, error) {
	t := token{uid: uint32(os.Geteuid())}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return t, fmt.Errorf("which host this is: %w", err)
	}
	space := ""
	for _, kind := range []string{"net", "pid", "user"} {
		id, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			return t, fmt.Errorf("in which namespace this is: %w", err)
		}
		space += id + " "
	}
	t.host, t.space = digest(bytes.TrimSpace(boot)), digest([]byte(space))
	_, err = rand.Read(t.name[:])
	return t, err
}

func digest(b []byte) [8]byte {
	sum := sha256.Sum256(b)
	return [8]byte(sum[:8])
}

// encode returns the token in the form of van.NodeExtension.Local.
func (t *token) encode() []byte {
	b := make([]byte, 0, tokenLen)
	b = binary.LittleEndian.AppendUint32(b, tokenVersion)
	b = append(append(b, t.host[:]...), t.space[:]...)
	b = binary.LittleEndian.AppendUint32(b, t.uid)
	return append(b, t.name[:]...)
}

// parseToken parses van.NodeExtension.Local. It reports false if that is empty or not a token.
func parseToken(b []byte) (t token, ok bool) {
	if len(b) != tokenLen || binary.LittleEndian.Uint32(b) != tokenVersion {
		return t, false
	}
	t.host, t.space = [8]byte(b[4:12]), [8]byte(b[12:20])
	t.uid = binary.LittleEndian.Uint32(b[20:])
	t.name = [16]byte(b[24:40])
	return t, true
}

// reach returns why a peer with token p cannot be reached through memory, or "".
func (t *token) reach(p *token) string {
	switch {
	case t.host != p.host:
		return "it is on another host"
	case t.uid != p.uid:
		return fmt.Sprintf("it runs as user %d, this process as user %d", p.uid, t.uid)
	case t.space != p.space:
		return "it is in another network, process or user namespace"
	}
	return ""
}

// address is the abstract Unix socket where the node listens.
func (t *token) address() string { return "@stepaf-" + hex.EncodeToString(t.name[:]) }

var _ = [1]struct{}{}[tokenLen/(van.MaxLocalLen+1)] // it fits
