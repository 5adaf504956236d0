// Package auth derives the keys of a cluster from its secret. Each transport proves with
// them that it knows the secret, and checks the proofs of its peers.
//
// All keys come from one HKDF (SHA-256), salted with the cluster's id. Each purpose has its
// own key, so a proof for one purpose is invalid for any other. The two ends of a handshake
// use different purposes. An attacker therefore cannot answer an end with that end's own
// message.
package auth

import (
	"crypto/ecdh"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/stepaf/stepaf-go/van/env"
)

// label begins the info of every derived key; it changes when the derivation does.
const label = "stepaf 1 "

// Keys are the keys of one cluster. A nil *Keys stands for a node without a secret, which
// proves nothing. Keys are safe for concurrent use.
type Keys struct {
	root     []byte // HKDF's pseudorandom key
	required bool
}

// Open reads the secret of a configuration, once. It returns nil if there is none or STEPAF_AUTH is off.
func Open(c *env.Config) (*Keys, error) {
	if c.AuthMode() == env.AuthOff {
		return nil, nil
	}
	secret, err := c.ReadSecret()
	if err != nil {
		return nil, err
	}
	if secret == nil {
		return nil, &env.Error{Name: "STEPAF_AUTH", Value: c.Auth, Why: "no secret is set", Want: "STEPAF_SECRET_FILE, or STEPAF_SECRET"}
	}
	return New(secret, c.ClusterID, c.AuthMode() == env.AuthRequire)
}

// New derives the keys of the cluster whose id is cluster, which may be empty.
func New(secret []byte, cluster string, required bool) (*Keys, error) {
	root, err := hkdf.Extract(sha256.New, secret, []byte(cluster))
	if err != nil {
		return nil, fmt.Errorf("deriving keys of the cluster's secret: %w", err)
	}
	return &Keys{root: root, required: required}, nil
}

// Required reports whether peers without a proof are refused (STEPAF_AUTH=require).
func (k *Keys) Required() bool { return k != nil && k.required }

// Key returns the 32-byte key for a purpose: the first block of HKDF-Expand.
func (k *Keys) Key(purpose string) [32]byte {
	h := hmac.New(sha256.New, k.root)
	h.Write([]byte(label + purpose))
	h.Write([]byte{1}) // the block's number
	return [32]byte(h.Sum(nil))
}

// Curve returns the Curve25519 key pair for a purpose.
func (k *Keys) Curve(purpose string) (public, private [32]byte, err error) {
	private = k.Key(purpose)
	key, err := ecdh.X25519().NewPrivateKey(private[:])
	if err != nil {
		return public, private, fmt.Errorf("deriving keys of the cluster's secret: %w", err)
	}
	return [32]byte(key.PublicKey().Bytes()), private, nil
}

// ProofLen is the length of a proof, in bytes.
const ProofLen = 16

// Proof returns the proof for a purpose over parts: an HMAC of their lengths and bytes,
// truncated to ProofLen. The parts must make the handshake unique: they must include a
// fresh random number of the end that checks the proof.
func (k *Keys) Proof(purpose string, parts ...[]byte) [ProofLen]byte {
	key := k.Key(purpose)
	h := hmac.New(sha256.New, key[:])
	var n [8]byte
	for _, p := range parts {
		binary.LittleEndian.PutUint64(n[:], uint64(len(p)))
		h.Write(n[:])
		h.Write(p)
	}
	return [ProofLen]byte(h.Sum(nil))
}

// Check reports whether proof is the Proof for the purpose over parts. Its duration does
// not depend on the position of a difference.
func (k *Keys) Check(proof []byte, purpose string, parts ...[]byte) bool {
	want := k.Proof(purpose, parts...)
	return hmac.Equal(proof, want[:])
}
