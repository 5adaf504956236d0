package kv

import (
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// PushOption changes one Push: Lens, Cmd, Within, Done, NoCopy. It costs no allocation.
type PushOption interface{ pushOption() }

// PullOption changes one Pull: LensInto, Cmd, Within, Done, NoCopy. It costs no allocation.
type PullOption interface{ pullOption() }

// Lens is the number of values of each key of a push. Without it all keys have the same
// number.
type Lens []int32

func (Lens) pushOption() {}

type lensInto struct {
	lens *[]int32
	_    uintptr // a struct of one pointer would lie in the interface itself, and all options would be allocated
}

// LensInto has lens filled with the number of values of each key of a pull. An empty
// slice is resized; another one must have one entry for each key.
func LensInto(lens *[]int32) PullOption { return lensInto{lens: lens} }

func (lensInto) pullOption() {}

// Cmd travels to the server's handler. It is 0 without an option.
type Cmd int32

func (Cmd) pushOption() {}
func (Cmd) pullOption() {}

// Within is the time limit of a request, counted from the call that made it. It holds for a Wait whose context has no
// deadline, and for a request with Done that no Wait waits for. It replaces the Timeout of the worker's options; negative
// means no limit.
type Within time.Duration

func (Within) pushOption() {}
func (Within) pullOption() {}

// DoneOption is what Done returns.
type DoneOption struct {
	f func(error)
	_ uintptr // a struct of one pointer would lie in the interface itself, and all options would be allocated
}

// Done calls f exactly once when the request has finished: with nil when its values have arrived, otherwise with the
// error of Wait. f runs before Wait returns: on the transport's goroutine; on the caller's, before the call returns, if
// nothing was sent; or, at the limit, on a goroutine that ends other requests, too. f may make further requests. It must
// not wait for them, or for anything else that may take long, since it may run on the goroutine of a Wait that receives
// from all servers. f is not called if the call itself returns an error. If no Wait waits for the request at its limit
// (see Within), the request ends with postoffice.ErrTimeout.
func Done(f func(error)) DoneOption { return DoneOption{f: f} }

func (DoneOption) pushOption()   {}
func (DoneOption) pullOption()   {}
func (DoneOption) simpleOption() {}

// SimpleOption changes one request of a SimpleApp: Done.
type SimpleOption interface{ simpleOption() }

// Copying says whether the library copies what a request sends.
type Copying uint8

// NoCopy lends keys, and in a push values and lengths, to the library: they must stay as
// they are until the request is done. Without it they are copied.
const NoCopy Copying = 1

func (Copying) pushOption() {}
func (Copying) pullOption() {}

// RespondOption changes one Respond: OnSent.
type RespondOption interface{ respondOption() }

type onSent struct{ done van.Completion }

// OnSent has done called once, from any goroutine, when the transport does not need the
// slices of an answer any more; it must neither block nor send. It is not called when
// Respond returns an error.
func OnSent(done van.Completion) RespondOption { return onSent{done} }

func (onSent) respondOption() {}

// options are those of one request.
type options struct {
	lens   []int32
	into   *[]int32
	cmd    int32
	limit  time.Duration
	done   func(error)
	noCopy bool
}

// with returns the options of a Push or a Pull, whose type is Option.
func with[Option any](limit time.Duration, opts []Option) (options, error) {
	o := options{limit: limit}
	for i, opt := range opts {
		switch opt := any(opt).(type) {
		case Lens:
			o.lens = opt
		case lensInto:
			o.into = opt.lens
		case Cmd:
			o.cmd = int32(opt)
		case Within:
			o.limit = time.Duration(opt)
		case DoneOption:
			o.done = opt.f
		case Copying:
			o.noCopy = opt == NoCopy
		default:
			return o, fmt.Errorf("%w: option %d is nil", van.ErrInvalid, i)
		}
	}
	return o, nil
}
