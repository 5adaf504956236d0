package collective

// Wire format: the bodies of requests and answers between ranks. Other fields are those of ps-lite.

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/internal/commlayer"
	"github.com/stepaf/stepaf-go/van"
)

// appBase is the application id of the communicator with ID 0.
const appBase = commlayer.AppBase

// maxID is the largest Options.ID.
const maxID = commlayer.MaxID

// version is the first byte of every body.
const version = 1

// verb is the second byte of a body.
type verb byte

const (
	verbHello   verb = iota + 1 // a request: the sender is in New or Rebuild; and its answer
	verbAsk                     // a request for a part
	verbAbort                   // a request: the communicator has failed at the sender
	verbRefused                 // the answer to any request: a reason
	verbDone                    // the answer to an abort
)

// Lengths of bodies, and of a reason in one.
const (
	headLen  = 2
	helloLen = headLen + 8 + 8 + 8 + 4
	askLen   = headLen + 2 + 4 + 4 + 8 + 8
	maxText  = 1000
)

// kind is the type of a call.
type kind byte

const (
	allGather kind = iota + 1
	allGatherV
	allToAll
	broadcast
	gather
	scatter
	barrier
	reduceScatter
	allReduce
	lastKind = allReduce
)

var kinds = [...]string{"", "AllGather", "AllGatherV", "AllToAll", "Broadcast", "Gather", "Scatter", "Barrier", "ReduceScatter", "AllReduce"}

// call describes a call. It must be equal on all ranks.
type call struct {
	kind      kind
	reduction Reduction
	dtype     af.Dtype
	root      int32  // -1 for calls without one
	bytes     uint64 // size of each rank's part; 0 if sizes differ among ranks
}

func (c call) String() string {
	s := kinds[c.kind]
	if c.kind == barrier {
		return s
	}
	if c.bytes > 0 || c.kind != allGatherV && c.kind != allToAll {
		s += fmt.Sprintf(" of %d bytes", c.bytes)
	}
	s += " of " + c.dtype.String()
	if c.reduction != 0 {
		s += " by " + c.reduction.String()
	}
	if c.root >= 0 {
		s += fmt.Sprintf(" with root %d", c.root)
	}
	return s
}

// appendAsk appends the body of a request for a part.
func (c call) appendAsk(b []byte, epoch uint64) []byte {
	b = append(b, version, byte(verbAsk), byte(c.kind), byte(c.reduction))
	b = binary.LittleEndian.AppendUint32(b, uint32(c.dtype))
	b = binary.LittleEndian.AppendUint32(b, uint32(c.root))
	b = binary.LittleEndian.AppendUint64(b, c.bytes)
	return binary.LittleEndian.AppendUint64(b, epoch)
}

// parseAsk parses the output of appendAsk, for n ranks.
func parseAsk(b []byte, n int) (c call, epoch uint64, err error) {
	if len(b) != askLen {
		return call{}, 0, &van.FieldError{Field: "body_size", Value: len(b), Want: fmt.Sprint(askLen)}
	}
	c = call{kind: kind(b[2]), reduction: Reduction(b[3]), dtype: af.Dtype(binary.LittleEndian.Uint32(b[4:])),
		root: int32(binary.LittleEndian.Uint32(b[8:])), bytes: binary.LittleEndian.Uint64(b[12:])}
	switch {
	case c.kind == 0 || c.kind > lastKind:
		return call{}, 0, &van.FieldError{Field: "body kind", Value: b[2], Want: fmt.Sprintf("1 to %d", lastKind)}
	case c.reduction > lastReduction:
		return call{}, 0, &van.FieldError{Field: "body reduction", Value: b[3], Want: fmt.Sprintf("0 to %d", lastReduction)}
	case !c.dtype.Valid():
		return call{}, 0, &van.FieldError{Field: "body dtype", Value: int32(c.dtype), Want: "a known one"}
	case c.root < -1 || int(c.root) >= n:
		return call{}, 0, &van.FieldError{Field: "body root", Value: c.root, Want: fmt.Sprintf("-1 to %d", n-1)}
	}
	return c, binary.LittleEndian.Uint64(b[20:]), nil
}

// hello is the message that ranks exchange in New and Rebuild.
type hello struct {
	epoch uint64 // proposed; the largest proposal of all ranks is used
	round uint64 // of the sender; distinguishes a repeated hello from a later one
	ranks uint64 // hash of the node ids
	n     uint32 // number of ranks
}

func (h hello) append(b []byte) []byte {
	b = append(b, version, byte(verbHello))
	b = binary.LittleEndian.AppendUint64(b, h.epoch)
	b = binary.LittleEndian.AppendUint64(b, h.round)
	b = binary.LittleEndian.AppendUint64(b, h.ranks)
	return binary.LittleEndian.AppendUint32(b, h.n)
}

func parseHello(b []byte) (hello, error) {
	if len(b) != helloLen {
		return hello{}, &van.FieldError{Field: "body_size", Value: len(b), Want: fmt.Sprint(helloLen)}
	}
	return hello{binary.LittleEndian.Uint64(b[2:]), binary.LittleEndian.Uint64(b[10:]), binary.LittleEndian.Uint64(b[18:]),
		binary.LittleEndian.Uint32(b[26:])}, nil
}

// verbOf checks the head of a body.
func verbOf(b []byte) (verb, error) {
	switch {
	case len(b) < headLen:
		return 0, &van.FieldError{Field: "body_size", Value: len(b), Want: "2 or more"}
	case b[0] != version:
		return 0, &van.FieldError{Field: "body version", Value: b[0], Want: fmt.Sprint(version)}
	}
	return verb(b[1]), nil
}

// causes maps the first byte of a reason to an error; 0 is none of them.
var causes = [...]error{1: ErrMismatch, 2: van.ErrPeerLost, 3: van.ErrTimeout, 4: van.ErrClosed, 5: errRebuild, 6: errMisfit}

// appendReason appends the reason of the sender's failure; round is the sender's latest round.
func appendReason(b []byte, v verb, round uint64, why error) []byte {
	code := 0
	for i := len(causes) - 1; i > 0; i-- { // an errMisfit is an ErrMismatch, too
		if errors.Is(why, causes[i]) {
			code = i
			break
		}
	}
	b = append(b, version, byte(v))
	b = binary.LittleEndian.AppendUint64(b, round)
	b = append(b, byte(code))
	text := why.Error()
	return append(b, text[:min(len(text), maxText)]...)
}

// parseReason parses the output of appendReason.
func parseReason(b []byte) (round uint64, why error, err error) {
	const head = headLen + 9
	if len(b) < head || len(b) > head+maxText {
		return 0, nil, &van.FieldError{Field: "body_size", Value: len(b), Want: fmt.Sprintf("%d to %d", head, head+maxText)}
	}
	cause := ErrAborted
	if code := int(b[10]); code > 0 && code < len(causes) {
		cause = causes[code]
	}
	return binary.LittleEndian.Uint64(b[2:]), &remoteError{fmt.Sprintf("%q", b[head:]), cause}, nil
}

// refusal returns the reason in a body, or a parse error.
func refusal(b []byte) error {
	_, why, err := parseReason(b)
	return cmp.Or(err, why)
}

// remoteError is the failure of another rank, as the rank reported it.
type remoteError struct {
	text  string
	cause error
}

func (e *remoteError) Error() string { return "the rank has failed: " + e.text }
func (e *remoteError) Unwrap() error { return e.cause }

// partKey is the key of a request for a part.
func partKey(seq uint32, rank int) uint64 { return uint64(seq)<<16 | uint64(uint16(rank)) }

func parseKey(k uint64) (seq uint32, rank int) { return uint32(k >> 16), int(uint16(k)) }
