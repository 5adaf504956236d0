package session

// Wire format: requests of the controller and their answers.

import (
	"encoding/binary"
	"fmt"

	"github.com/stepaf/stepaf-go/van"
)

// appIDs is the application id of the session with ID 0; the ID of a session is added.
const (
	appIDs = 0x5A5000
	maxID  = 255
)

// Kinds of requests; the head of the message.
const (
	wantOpen    int32 = iota + 1 // begin a session
	wantCall                     // run a function
	wantSet                      // store a value
	wantGet                      // return a value
	wantList                     // list the handles
	wantNothing                  // answer in turn
	wantStop                     // end Serve
	wantAbort                    // end Serve with an error, at once
	wantLeave                    // from a rank to the controller: its Serve has ended
	wantForget                   // forget a session that has not begun: Serve waits for the next one
)

// magic is the beginning of all bodies; its last byte is the version.
const magic = 0x53455301

// request is the body of a request. The fields in use depend on the kind.
type request struct {
	session uint64
	seq     uint64   // number of the call, from 0
	kills   []uint64 // handles to be released before the call
	ranks   uint32   // wantOpen: number of ranks
	handle  uint64   // wantCall: handle of the result; wantSet and wantGet: handle of the value
	text    string   // wantCall: the function's name; wantAbort, wantLeave and wantForget: the reason
	values  []any    // wantCall: arguments; wantSet: the value
}

func (q *request) append(b []byte, want int32) ([]byte, error) {
	b = binary.LittleEndian.AppendUint32(b, magic)
	b = binary.LittleEndian.AppendUint64(b, q.session)
	b = binary.LittleEndian.AppendUint64(b, q.seq)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(q.kills)))
	for _, id := range q.kills {
		b = binary.LittleEndian.AppendUint64(b, id)
	}
	var err error
	switch want {
	case wantOpen:
		b = binary.LittleEndian.AppendUint32(b, q.ranks)
	case wantCall, wantSet:
		b = binary.LittleEndian.AppendUint64(b, q.handle)
		if b, err = appendText(b, q.text); err != nil {
			return b, err
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(len(q.values)))
		write := appendValue
		if want == wantSet {
			write = appendKept
		}
		for i, v := range q.values {
			if b, err = write(b, v); err != nil {
				return b, fmt.Errorf("argument %d: %w", i, err)
			}
		}
	case wantGet:
		b = binary.LittleEndian.AppendUint64(b, q.handle)
	case wantAbort, wantLeave, wantForget:
		b, err = appendText(b, q.text)
	}
	return b, err
}

// parseRequest parses the body of a request. The values are views of the body.
func parseRequest(want int32, body []byte) (q request, err error) {
	r := &reader{b: body}
	if m := r.u32("begin"); r.err == nil && m != magic {
		return q, &van.FieldError{Field: "session begin", Value: m, Want: fmt.Sprint(uint32(magic))}
	}
	q.session, q.seq = r.u64("session"), r.u64("number")
	q.kills = make([]uint64, r.count(8, "handles"))
	for i := range q.kills {
		q.kills[i] = r.u64("handle")
	}
	switch want {
	case wantOpen:
		q.ranks = r.u32("ranks")
	case wantCall, wantSet:
		q.handle, q.text = r.u64("handle"), r.text("name")
		q.values = make([]any, r.count(1, "arguments"))
		for i := range q.values {
			q.values[i] = r.value()
		}
		if want == wantSet && r.err == nil && (len(q.values) != 1 || isHandle(q.values[0])) {
			r.err = fmt.Errorf("%w: %d values to set, want 1, and no handle", van.ErrMalformed, len(q.values))
		}
	case wantGet:
		q.handle = r.u64("handle")
	case wantAbort, wantLeave, wantForget:
		q.text = r.text("reason")
	case wantList, wantNothing, wantStop:
	default:
		r.err = fmt.Errorf("%w: request %d", van.ErrMalformed, want)
	}
	return q, r.end()
}

// outcome is the kind of an answer.
type outcome byte

const (
	done    outcome = iota // success, with a value if one was requested
	failed                 // with the text of the error
	refused                // the rank does not take part in the session; with the reason
)

type answer struct {
	session uint64
	seq     uint64
	outcome outcome
	text    string
	value   any
	handles []uint64
}

func (a *answer) append(b []byte, want int32) ([]byte, error) {
	b = binary.LittleEndian.AppendUint32(b, magic)
	b = binary.LittleEndian.AppendUint64(b, a.session)
	b = binary.LittleEndian.AppendUint64(b, a.seq)
	b = append(b, byte(a.outcome))
	switch {
	case a.outcome != done:
		return appendText(b, a.text)
	case want == wantGet:
		return appendKept(b, a.value)
	case want == wantList:
		b = binary.LittleEndian.AppendUint32(b, uint32(len(a.handles)))
		for _, id := range a.handles {
			b = binary.LittleEndian.AppendUint64(b, id)
		}
	}
	return b, nil
}

func parseAnswer(want int32, body []byte) (a answer, err error) {
	r := &reader{b: body}
	if m := r.u32("begin"); r.err == nil && m != magic {
		return a, &van.FieldError{Field: "session begin", Value: m, Want: fmt.Sprint(uint32(magic))}
	}
	a.session, a.seq, a.outcome = r.u64("session"), r.u64("number"), outcome(r.u8("outcome"))
	switch {
	case a.outcome > refused:
		r.err = fmt.Errorf("%w: outcome %d", van.ErrMalformed, a.outcome)
	case a.outcome != done:
		a.text = r.text("text")
	case want == wantGet:
		if a.value = r.value(); r.err == nil && isHandle(a.value) {
			r.err = fmt.Errorf("%w: a handle as a value", van.ErrMalformed)
		}
	case want == wantList:
		a.handles = make([]uint64, r.count(8, "handles"))
		for i := range a.handles {
			a.handles[i] = r.u64("handle")
		}
	}
	return a, r.end()
}
