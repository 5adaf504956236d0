package membership

// Notices: messages between nodes of this library that ps-lite does not have, as text in the body of a HEARTBEAT.

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/internal/logx"
	"github.com/stepaf/stepaf-go/van"
)

const (
	noticePrefix = "stepaf/1 "
	maxNotice    = 4096          // bytes of a body, except that of a down notice
	maxDown      = 6 * van.Empty // bytes of a down notice: 5 digits and a comma for each id
	proofLen     = 16            // hexadecimal digits of a proof, see proof.go
)

// Verbs of a notice.
const (
	verbError   = "error"   // <text>: the receiver is not, or no longer, part of the cluster
	verbWaiting = "waiting" // <text>: the missing nodes
	verbDead    = "dead"    // <id> <text>: the node is dead, and why
	verbCut     = "cut"     // the same; only the scheduler's connection to it is known to be broken
	verbBack    = "back"    // <id>: the node is alive again
	verbDown    = "down"    // <id>,<id>...: these nodes are dead, and no others
	verbRejoin  = "rejoin"  // [table]: the scheduler is a new process; with table, send the node's table
	// rejoin <proof>: the same, and the proof of the node's address; the node's heartbeats repeat it
	verbBarrier = "barrier-failed"
	// barrier-failed <group> <instance|group> <text>: the barrier cannot complete
	verbWithdraw = "withdraw"
	// withdraw <group> <instance|group>: to the scheduler, the request that the key names is canceled
	verbWhether    = "whether"  // <group> <instance|group>: does the node still wait for the request that the key names?
	verbWaits      = "waits"    // the same: it does; else the answer is withdraw
	verbReleased   = "released" // the same, of a barrier that ends a program: it has the release, or leaves without it
	verbPolicies   = "policies" // <version> <policy>...: to a node; from a node to a new scheduler
	verbHave       = "have"     // <version> <states>: to the scheduler, the node's states of them
	verbRegistered = "registered"
	// registered <incarnation> <host:port>: to the scheduler, from a process that waits to be admitted
	verbRegister = "register" // [proof]: to that process: the scheduler does not know it; it must register again, with the proof of its address
	verbEnded    = "ended"    // <text>: to the scheduler, from a process that ends before it has registered: the node and the cause
	verbAsk      = "ask"      // <incarnation> <host:port> <question>: to the scheduler, from a process that is not a node
	verbAnswer   = "answer"   // <number> <text>: to that process
)

// notice is the content of a notice. The scheduler sends notices to nodes, and nodes to the scheduler.
type notice struct {
	verb     string
	id       int // dead, back
	group    int // barrier-failed, withdraw, whether, waits, released
	instance bool
	text     string
}

func (n notice) body() []byte {
	s := noticePrefix + n.verb
	switch n.verb {
	case verbDead, verbCut, verbBack:
		s += " " + strconv.Itoa(n.id)
	case verbBarrier, verbWithdraw, verbWhether, verbWaits, verbReleased:
		s += " " + strconv.Itoa(n.group) + " " + kindName(n.instance)
	}
	if n.text != "" {
		s += " " + logx.Printable(n.text)
	}
	if n.verb != verbDown && len(s) > maxNotice { // a list that is cut off would be refused
		s = strings.ToValidUTF8(s[:maxNotice-3], "") + "..."
	}
	return []byte(s)
}

// ids returns the ids that the text of a down notice lists, or nil if it is no such list.
func (n *notice) ids() []int {
	var ids []int
	for _, w := range strings.Split(n.text, ",") {
		id, ok := number(w)
		if !ok || id < 8 || id >= van.Empty {
			return nil
		}
		ids = append(ids, id)
	}
	return ids
}

// parseNotice reads the body of a HEARTBEAT without node records.
func parseNotice(body []byte) (notice, error) {
	bad := func(field string, v any, want string) (notice, error) {
		return notice{}, &van.FieldError{Field: field, Value: v, Want: want}
	}
	most := maxNotice
	if bytes.HasPrefix(body, []byte(noticePrefix+verbDown+" ")) {
		most = maxDown
	}
	if len(body) > most {
		return bad("body_size", len(body), fmt.Sprintf("at most %d", most))
	}
	if !utf8.Valid(body) {
		return bad("body", "not UTF-8", "text")
	}
	s := string(body)
	if i := strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }); i >= 0 {
		return bad("body", fmt.Sprintf("%q", s[i]), "printable text")
	}
	rest, ok := strings.CutPrefix(s, noticePrefix)
	if !ok {
		return bad("body", strconv.Quote(truncated(s)), "a text that begins with "+strconv.Quote(noticePrefix))
	}
	var n notice
	word := func() string {
		w, r, _ := strings.Cut(rest, " ")
		rest = r
		return w
	}
	n.verb = word()
	switch n.verb {
	case verbError, verbWaiting, verbPolicies, verbHave, verbRegistered, verbEnded, verbAsk, verbAnswer:
		n.text = rest
		if n.text == "" {
			return bad("body "+n.verb, `""`, "a text")
		}
	case verbDown:
		if n.text = rest; n.ids() == nil && n.text != "" {
			return bad("body "+n.verb, strconv.Quote(truncated(s)), "ids of workers and servers with commas between them")
		}
	case verbRejoin:
		if n.text = rest; n.text != "" && n.text != "table" && !isProof(rest) {
			return bad("body "+n.verb, strconv.Quote(truncated(s)), "table, a proof, or nothing")
		}
	case verbRegister:
		if n.text = rest; n.text != "" && !isProof(rest) {
			return bad("body "+n.verb, strconv.Quote(truncated(s)), "a proof, or nothing")
		}
	case verbDead, verbCut, verbBack:
		id, ok := number(word())
		if !ok || id < 8 || id >= van.Empty {
			return bad("body "+n.verb, strconv.Quote(truncated(s)), "the id of a worker or server")
		}
		if n.verb == verbBack && rest != "" {
			return bad("body back", strconv.Quote(truncated(s)), "nothing after the id")
		}
		n.id, n.text = id, rest
	case verbBarrier, verbWithdraw, verbWhether, verbWaits, verbReleased:
		group, ok := number(word())
		if !ok || group < 1 || group > van.AllNodes {
			return bad("body "+n.verb, strconv.Quote(truncated(s)), "a group from 1 to 7")
		}
		kind := word()
		if kind != kindName(true) && kind != kindName(false) {
			return bad("body "+n.verb, strconv.Quote(truncated(s)), "instance or group")
		}
		if n.verb != verbBarrier && rest != "" {
			return bad("body "+n.verb, strconv.Quote(truncated(s)), "nothing after the kind")
		}
		n.group, n.instance, n.text = group, kind == kindName(true), rest
	default:
		return bad("body", strconv.Quote(truncated(s)), "a known verb")
	}
	return n, nil
}

// isProof reports whether s may be a proof.
func isProof(s string) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == proofLen/2 && hex.EncodeToString(b) == s
}

// number accepts only numbers as notice.body writes them: digits without sign or leading 0.
func number(s string) (int, bool) {
	n, err := strconv.Atoi(s)
	return n, err == nil && n >= 0 && strconv.Itoa(n) == s
}

func truncated(s string) string {
	const most = 60
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "..."
	}
	return s
}

// parseProcess parses the address of a process that is not a node, "<incarnation> <host:port>", and returns the text
// after it.
func (t *table) parseProcess(from int, msg *van.Meta, n notice) (rec van.Node, rest string, err error) {
	words := append(strings.SplitN(n.text, " ", 3), "", "")
	inc, ok := number(words[0])
	addr, err := netip.ParseAddrPort(words[1])
	if !ok || inc < 1 || inc >= 1<<32 || err != nil || addr.Port() == 0 || !numeric(addr.Addr().String()) || hostaddr.Check(addr.Addr().String()) != nil {
		return rec, "", t.bad(from, msg, "body "+n.verb, strconv.Quote(truncated(n.text)), "an incarnation, and a numeric address")
	}
	id := van.NodeExtension{Incarnation: uint32(inc)}
	return van.Node{Role: van.Worker, ID: van.Empty, Hostname: addr.Addr().String(), Port: int(addr.Port()), Ports: []int32{int32(addr.Port())},
		DevTypes: []int32{0}, DevIDs: []int32{0}, Endpoint: id.Encode(), AuxID: -1}, words[2], nil
}
