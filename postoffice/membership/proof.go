package membership

// Proofs that a process listens at the address in its record. Any process can send a record with any address. Where
// the record would replace a member, dead or alive, the scheduler sends a proof to that address, and accepts the
// record when it arrives again with the proof: only a process that receives messages there knows the proof. A proof
// says nothing else about the process.

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/failpoint"
	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/van"
)

// addressProof is the proof of the process and the address of n.
func (t *table) addressProof(n *van.Node) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%016x %08x %08x %d %s", t.cfg.Nonce, t.own.Incarnation, incarnationOf(n), n.Port, hostaddr.Canonical(n.Hostname)))
	return hex.EncodeToString(sum[:proofLen/2])
}

// hasProof reports whether msg, which has the record n, has n's proof in a notice with that verb.
func (t *table) hasProof(n *van.Node, msg *van.Meta, verb string) bool {
	what, err := parseNotice(msg.Body)
	return incarnationOf(n) != 0 && err == nil && what.verb == verb && subtle.ConstantTimeCompare([]byte(what.text), []byte(t.addressProof(n))) == 1 ||
		failpoint.On("proof")
}

// extraChallenges is the number of proofs that may be sent in a second, in addition to one for each node of the
// cluster.
const extraChallenges = 100

// challenges sends proofs, within a limit: each costs a connection.
type challenges struct {
	core
	sent  int
	since time.Duration // sent counts the proofs of the second from since on
}

// required reports whether a process must prove its address, and has not done so. C++ StepMesh processes cannot. With
// PS_RESEND a lost proof would not be sent again.
func (c *challenges) required(j *registration) bool {
	return !j.proved && incarnationOf(&j.node) != 0 && !c.table.own.Settings.Resend && !failpoint.On("proof")
}

// allow reports whether one more proof may be sent, and counts it.
func (c *challenges) allow(now time.Duration, rec *van.Node) bool {
	if now >= c.since+time.Second {
		c.sent, c.since = 0, now
	}
	c.sent++
	return c.sent <= c.cfg.groupLen(van.WorkerGroup|van.ServerGroup)+extraChallenges && numeric(rec.Hostname)
}

// send sends the proof of rec to its address. The process there registers again with the proof if it is that of rec.
// If the proof is lost, the process asks again later.
func (c *challenges) send(now time.Duration, rec *van.Node) {
	if !c.allow(now, rec) {
		return
	}
	temp := c.out.connectTemp(*rec)
	c.out.notify(temp, notice{verb: verbRegister, text: c.table.addressProof(rec)})
	c.out.disconnect(temp)
}
