package window

// What ranks tell each other: in the body of messages, beside ps-lite's fields, and all of them by Exchange.

import (
	"encoding/binary"
	"fmt"

	"github.com/stepaf/stepaf-go/van"
)

// appBase is the application id of the first window of the communicator with ID 0: each
// communicator has windowsEach of them.
const (
	appBase     = 0x5B00000
	windowsEach = 1 << 8
)

// appOf is the application id of a window. Indices begin anywhere in each epoch, so that an earlier
// epoch's window that somebody has not closed is rarely in the way. Open takes the next one then.
func appOf(epoch uint64, number uint32, communicator int) int {
	index := (epoch*0x9E3779B97F4A7C15>>56 + uint64(number)) % windowsEach
	return appBase + communicator*windowsEach + int(index)
}

// dataKey is in the key frame of messages with data. Nothing looks anything up by it.
const dataKey = 0x5AF<<48 | 1

// version is the first byte of every body.
const version = 1

// verb is the second byte of a body.
type verb byte

const (
	verbPut   verb = iota + 1 // data, a signal, or both
	verbAsk                   // a wish for a verbTaken
	verbTaken                 // how many of the receiver's messages the sender has taken
	verbClose                 // the sender has closed its window; says the same
	verbOver                  // the sender's window, which is on devices, is over
	lastVerb  = verbOver
)

// noSignal in a message: it has none.
const noSignal = 0xFFFF

// maxSignals is the largest Options.Signals.
const maxSignals = noSignal

// note is the body of a message.
type note struct {
	verb   verb
	signal uint16
	window uint32 // the number of the window in its communicator's epoch
	epoch  uint64
	seq    uint64 // the message's number among those to its receiver, from 0; in a verbTaken it is none
	offset uint64 // where data goes
	taken  uint64 // messages of the receiver that have been taken: all with lower numbers
	bytes  uint64 // and the data in them
}

const noteLen = 2 + 2 + 4 + 5*8

func (n *note) append(b []byte) []byte {
	le := binary.LittleEndian
	b = append(b, version, byte(n.verb))
	b = le.AppendUint16(b, n.signal)
	b = le.AppendUint32(b, n.window)
	for _, v := range [...]uint64{n.epoch, n.seq, n.offset, n.taken, n.bytes} {
		b = le.AppendUint64(b, v)
	}
	return b
}

// parse reads what append has written. Nothing in it is checked but its form.
func parse(b []byte) (n note, err error) {
	le := binary.LittleEndian
	switch {
	case len(b) != noteLen:
		return note{}, &van.FieldError{Field: "body_size", Value: len(b), Want: fmt.Sprint(noteLen)}
	case b[0] != version:
		return note{}, &van.FieldError{Field: "body version", Value: b[0], Want: fmt.Sprint(version)}
	case b[1] == 0 || verb(b[1]) > lastVerb:
		return note{}, &van.FieldError{Field: "body verb", Value: b[1], Want: fmt.Sprintf("1 to %d", lastVerb)}
	}
	return note{verb(b[1]), le.Uint16(b[2:]), le.Uint32(b[4:]), le.Uint64(b[8:]), le.Uint64(b[16:]), le.Uint64(b[24:]),
		le.Uint64(b[32:]), le.Uint64(b[40:])}, nil
}

// shape is what must be the same on all ranks.
type shape struct {
	size    uint64
	signals uint32
	number  uint32 // of the window
	refused bool   // the rank's arguments were refused there
	device  bool   // it is on devices
	inUse   bool   // its application id is in use there; need not be the same
}

const shapeLen = 8 + 4 + 4 + 1

func (s shape) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, s.size)
	b = binary.LittleEndian.AppendUint32(b, s.signals)
	b = binary.LittleEndian.AppendUint32(b, s.number)
	var flags byte
	for i, is := range [...]bool{s.refused, s.device, s.inUse} { // in the order of shapeRefused and those after it
		if is {
			flags |= 1 << i
		}
	}
	return append(b, flags)
}

// What the last byte of a shape says.
const (
	shapeRefused = 1 << iota
	shapeDevice
	shapeInUse
)

func parseShape(b []byte) (shape, error) {
	if len(b) != shapeLen || b[16] > shapeRefused|shapeDevice|shapeInUse {
		return shape{}, fmt.Errorf("%w: %x, want what Open says of a window, %d bytes", van.ErrMalformed, b[:min(len(b), 2*shapeLen)], shapeLen)
	}
	return shape{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint32(b[8:]), binary.LittleEndian.Uint32(b[12:]), b[16]&shapeRefused != 0, b[16]&shapeDevice != 0, b[16]&shapeInUse != 0}, nil
}

func (s shape) String() string {
	if s.refused {
		return "arguments that were refused there"
	}
	on := ""
	if s.device {
		on = " on the device"
	}
	return fmt.Sprintf("%d bytes%s and %d signals", s.size, on, s.signals)
}
