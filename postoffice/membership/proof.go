package membership

// Proofs that a process listens at the address in its record. Anybody can send a record with any address. Where the record
// would cost another process its place, the scheduler sends a proof to that address, and believes the record when it arrives again with the proof:
// only a process that receives what is sent there knows the proof. It says nothing else of that process.

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/van"
)

// proof is the proof of the process and the address of n.
func (t *table) proof(n *van.Node) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%016x %08x %08x %d %s", t.cfg.Nonce, t.own.Incarnation, incarnationOf(n), n.Port, hostaddr.Canonical(n.Hostname)))
	return hex.EncodeToString(sum[:proofLen/2])
}

// proves tells whether msg, which has the record n, has its proof in a notice with that verb.
func (t *table) proves(n *van.Node, msg *van.Meta, verb string) bool {
	what, err := parseNotice(msg.Body)
	return incarnationOf(n) != 0 && err == nil && what.verb == verb && subtle.ConstantTimeCompare([]byte(what.text), []byte(t.proof(n))) == 1 ||
		failpoint.On("proof")
}

// challenge sends the proof of rec to its address: the process there, if it is that of rec, registers again with it.
func (s *sender) challenge(rec *van.Node) {
	temp := s.reach(*rec)
	s.tell(temp, notice{verb: verbRegister, text: s.table.proof(rec)})
	s.disconnect(temp)
}
