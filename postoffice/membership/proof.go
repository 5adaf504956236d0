package membership

// Proofs that a process listens at the address in its record. Anybody can send a record with any address. Where the record
// would cost another process its place, or give the place of a dead one away, the scheduler sends a proof to that address, and believes the
// record when it arrives again with the proof: only a process that receives what is sent there knows the proof. It says nothing else of that process.

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

// hasProof tells whether msg, which has the record n, has its proof in a notice with that verb.
func (t *table) hasProof(n *van.Node, msg *van.Meta, verb string) bool {
	what, err := parseNotice(msg.Body)
	return incarnationOf(n) != 0 && err == nil && what.verb == verb && subtle.ConstantTimeCompare([]byte(what.text), []byte(t.addressProof(n))) == 1 ||
		failpoint.On("proof")
}

// extraChallenges is how many proofs are sent in a second, besides one for each node of the cluster.
const extraChallenges = 100

// challenges sends proofs, within a limit: each costs a connection.
type challenges struct {
	core
	sent  int
	since time.Duration // sent counts those of the second from since on
}

// required tells whether a process must prove its address, and has not done so. C++ StepMesh processes cannot. With PS_RESEND a
// proof that was lost would not be sent again.
func (c *challenges) required(j *registration) bool {
	return !j.proved && incarnationOf(&j.node) != 0 && !c.table.own.Settings.Resend && !failpoint.On("proof")
}

// allow tells whether one more proof may be sent, and counts it.
func (c *challenges) allow(now time.Duration, rec *van.Node) bool {
	if now >= c.since+time.Second {
		c.sent, c.since = 0, now
	}
	c.sent++
	return c.sent <= c.cfg.groupLen(van.WorkerGroup|van.ServerGroup)+extraChallenges && numeric(rec.Hostname)
}

// send sends the proof of rec to its address: the process there, if it is that of rec, registers again with it. If the proof is
// lost, the process asks again later.
func (c *challenges) send(now time.Duration, rec *van.Node) {
	if !c.allow(now, rec) {
		return
	}
	temp := c.out.connectTemp(*rec)
	c.out.notify(temp, notice{verb: verbRegister, text: c.table.addressProof(rec)})
	c.out.disconnect(temp)
}
