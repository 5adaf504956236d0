package window

// Wire format: the bodies of messages between ranks, and the values that all ranks exchange. Other fields are those
// of ps-lite.

import (
	"encoding/binary"
	"fmt"

	"github.com/stepaf/stepaf-go/van"
)

// appBase is the application id of the first window of the communicator with ID 0. Each communicator has windowsEach
// ids.
const (
	appBase     = 0x5B00000
	windowsEach = 1 << 8
)

// appOf returns the application id of a window. The first index of an epoch varies, so that an unclosed window of an
// earlier epoch rarely has the same id. If it has, Open tries the next one.
func appOf(epoch uint64, number uint32, communicator int) int {
	index := (epoch*0x9E3779B97F4A7C15>>56 + uint64(number)) % windowsEach
	return appBase + communicator*windowsEach + int(index)
}

// dataKey is in the key frame of messages with data. It is not used for lookups.
const dataKey = 0x5AF<<48 | 1

// version is the first byte of every body.
const version = 1

// verb is the second byte of a body.
type verb byte

const (
	verbPut   verb = iota + 1 // data, a signal, or both
	verbAsk                   // a request for a verbTaken
	verbTaken                 // how many of the receiver's messages the sender has processed
	verbClose                 // the sender has closed its window; contains the same counts
	verbOver                  // the sender's device window is over
	lastVerb  = verbOver
)

// noSignal marks a message without a signal.
const noSignal = 0xFFFF

// maxSignals is the largest Options.Signals.
const maxSignals = noSignal

// note is the body of a message.
type note struct {
	verb   verb
	signal uint16
	window uint32 // the number of the window in its communicator's epoch
	epoch  uint64
	seq    uint64 // number among the messages to its receiver, from 0; in a verbTaken it is not such a number
	offset uint64 // destination of the data
	taken  uint64 // messages of the receiver that were processed: all with lower numbers
	bytes  uint64 // data in them
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

// parse parses the output of append. It checks only the form.
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

// shape describes a window. It must be the same on all ranks, except for inUse.
type shape struct {
	size    uint64
	signals uint32
	number  uint32 // of the window
	refused bool   // the rank refused its own arguments
	device  bool   // a device window
	inUse   bool   // its application id is in use on the rank
}

const shapeLen = 8 + 4 + 4 + 1

func (s shape) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, s.size)
	b = binary.LittleEndian.AppendUint32(b, s.signals)
	b = binary.LittleEndian.AppendUint32(b, s.number)
	var flags byte
	for i, is := range [...]bool{s.refused, s.device, s.inUse} { // in the order of shapeRefused and the following constants
		if is {
			flags |= 1 << i
		}
	}
	return append(b, flags)
}

// Values of the last byte of a shape.
const (
	shapeRefused = 1 << iota
	shapeDevice
	shapeInUse
)

func parseShape(b []byte) (shape, error) {
	if len(b) != shapeLen || b[16] > shapeRefused|shapeDevice|shapeInUse {
		return shape{}, fmt.Errorf("%w: %x, want the description of a window, %d bytes", van.ErrMalformed, b[:min(len(b), 2*shapeLen)], shapeLen)
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
