package auth

import (
	"bytes"
	"encoding/hex"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van/env"
)

var secret = []byte("0123456789abcdef-the-secret")

const (
	wantKey    = "db6fa465ae373bd8eaa35f64a5a01f02955a4f651be433af4484beb8f2f6fa30"
	wantPublic = "7d64e685a4cb2b26d816eacd331324e1bfe713a62a932d07d986ff620af4986b"
	wantProof  = "909336fbafb265e2f8607dcd0bb85703"
)

func keys(t *testing.T, secret []byte, cluster string) *Keys {
	t.Helper()
	k, err := New(secret, cluster, true)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// TestDerivation pins the derivation: nodes of different versions must derive the same keys. The values are those of
// HKDF (RFC 5869) and X25519 (RFC 7748), computed by another program.
func TestDerivation(t *testing.T) {
	k := keys(t, secret, "run-7")
	key := k.Key("zmq server")
	public, private, err := k.Curve("zmq server")
	if err != nil {
		t.Fatal(err)
	}
	if got := hex.EncodeToString(key[:]); got != wantKey {
		t.Errorf("key %s, want %s", got, wantKey)
	}
	if private != key || hex.EncodeToString(public[:]) != wantPublic {
		t.Errorf("public key %x, want %s", public, wantPublic)
	}
	proof := k.Proof("test", []byte("a"), []byte("bc"))
	if got := hex.EncodeToString(proof[:]); got != wantProof {
		t.Errorf("proof %s, want %s", got, wantProof)
	}
}

// TestProof checks what a proof depends on.
func TestProof(t *testing.T) {
	k := keys(t, secret, "run-7")
	proof := k.Proof("purpose", []byte("ab"), []byte("c"))
	if !k.Check(proof[:], "purpose", []byte("ab"), []byte("c")) || !keys(t, secret, "run-7").Check(proof[:], "purpose", []byte("ab"), []byte("c")) {
		t.Error("the proof is refused where the secret is known")
	}
	flipped := bytes.Clone(proof[:])
	flipped[ProofLen-1] ^= 1
	for _, c := range []struct {
		name  string
		keys  *Keys
		proof []byte
		use   string
		parts [][]byte
	}{
		{"another secret", keys(t, []byte("another secret of 30 characters"), "run-7"), proof[:], "purpose", [][]byte{[]byte("ab"), []byte("c")}},
		{"another cluster", keys(t, secret, "run-8"), proof[:], "purpose", [][]byte{[]byte("ab"), []byte("c")}},
		{"another purpose", k, proof[:], "reflected", [][]byte{[]byte("ab"), []byte("c")}},
		{"another part", k, proof[:], "purpose", [][]byte{[]byte("ab"), []byte("d")}},
		{"other boundaries of the parts", k, proof[:], "purpose", [][]byte{[]byte("a"), []byte("bc")}},
		{"fewer parts", k, proof[:], "purpose", [][]byte{[]byte("abc")}},
		{"a flipped bit", k, flipped, "purpose", [][]byte{[]byte("ab"), []byte("c")}},
		{"a truncated proof", k, proof[:ProofLen-1], "purpose", [][]byte{[]byte("ab"), []byte("c")}},
		{"no proof", k, nil, "purpose", [][]byte{[]byte("ab"), []byte("c")}},
	} {
		if c.keys.Check(c.proof, c.use, c.parts...) {
			t.Errorf("%s is accepted", c.name)
		}
	}
}

func TestOpen(t *testing.T) {
	for _, c := range []struct {
		cfg      env.Config
		keys     bool
		required bool
		fails    bool
	}{
		{env.Config{}, false, false, false},
		{env.Config{Secret: env.Secret(secret)}, true, true, false},
		{env.Config{Secret: env.Secret(secret), Auth: env.AuthWarn}, true, false, false},
		{env.Config{Secret: env.Secret(secret), Auth: env.AuthOff}, false, false, false},
		{env.Config{SecretFile: "/nowhere", Auth: env.AuthOff}, false, false, false},
		{env.Config{SecretFile: "/nowhere"}, false, false, true},
		{env.Config{Auth: env.AuthRequire}, false, false, true},
	} {
		k, err := Open(&c.cfg)
		if (k != nil) != c.keys || k.Required() != c.required || (err != nil) != c.fails {
			t.Errorf("%+v: %v, %v", c.cfg, k != nil, err)
		}
	}
}
