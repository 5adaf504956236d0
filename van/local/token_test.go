package local

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/van"
)

func TestToken(t *testing.T) {
	own, err := newToken()
	if err != nil {
		t.Fatal(err)
	}
	b := own.encode()
	if len(b) > van.MaxLocalLen {
		t.Fatalf("the token has %d bytes, an identity has room for %d", len(b), van.MaxLocalLen)
	}
	same, ok := parseToken(b)
	if !ok || same != own {
		t.Errorf("parsed %+v %t, want %+v", same, ok, own)
	}
	if other, err := newToken(); err != nil || other.name == own.name || other.host != own.host || other.space != own.space {
		t.Errorf("another token of this process: %+v %v, want one that differs from %+v in its name only", other, err, own)
	}
	for _, c := range []struct {
		name string
		b    []byte
	}{
		{"nothing", nil},
		{"short", b[:len(b)-1]},
		{"long", append(bytes.Clone(b), 0)},
		{"other magic", append([]byte("XAFL"), b[4:]...)},
		{"later version", append([]byte("SAFL\x7f"), b[5:]...)},
		{"of another transport", bytes.Repeat([]byte{7}, van.MaxEndpointName)},
	} {
		if got, ok := parseToken(c.b); ok {
			t.Errorf("%s: parsed as %+v", c.name, got)
		}
	}
}

func TestReach(t *testing.T) {
	own, err := newToken()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		change func(*token)
		want   string
	}{
		{"itself", func(*token) {}, ""},
		{"another process", func(p *token) { p.name[3]++ }, ""},
		{"another host", func(p *token) { p.host[0]++; p.uid++; p.space[1]++ }, "on another host"},
		{"another user", func(p *token) { p.uid++ }, "runs as user"},
		{"a container", func(p *token) { p.space[7]++ }, "namespace"},
	} {
		peer := own
		c.change(&peer)
		if got := own.reach(&peer); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}
