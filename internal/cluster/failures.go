package cluster

// Failed requests that were forgotten are remembered as ranges, so that a late or repeated question about one does
// not report it as answered.

import (
	"cmp"
	"errors"
	"math"
	"slices"

	"github.com/stepaf/stepaf-go/van"
)

// maxFailures bounds the number of ranges of failed requests that are remembered.
const maxFailures = 4096

// failures are the failed requests of a customer.
type failures struct {
	list []failedRange // by timestamp; no two overlap
	// forgotten is the latest timestamp of the ranges that did not fit; a request that is as old may have failed. -1:
	// none.
	forgotten int32
}

// failedRange is a failed request, or a range of consecutive ones.
type failedRange struct {
	first, n int32
	err      error // of one of them
}

// add remembers a request. next is the timestamp that is issued next.
func (f *failures) add(first, n int32, err error, next int32) {
	i, _ := slices.BinarySearchFunc(f.list, first, byFirst)
	if f.list = slices.Insert(f.list, i, failedRange{first, n, err}); len(f.list) > maxFailures {
		f.shrink(next)
	}
}

func byFirst(x failedRange, ts int32) int { return cmp.Compare(x.first, ts) }

// shrink joins consecutive ranges with errors of one kind, and forgets the oldest ranges if that is not enough.
func (f *failures) shrink(next int32) {
	list := f.list[:1]
	for _, x := range f.list[1:] {
		if last := &list[len(list)-1]; last.first+last.n == x.first && alike(last.err, x.err) {
			last.n += x.n
		} else {
			list = append(list, x)
		}
	}
	clear(f.list[len(list):])
	f.list = list
	more := len(list) - maxFailures*3/4
	if more <= 0 {
		return
	}
	ages := make([]int32, len(list))
	for i, x := range list {
		ages[i] = age(x.first, next)
	}
	slices.Sort(ages)
	oldest := ages[len(ages)-more]
	f.list = slices.DeleteFunc(list, func(x failedRange) bool {
		if age(x.first, next) < oldest {
			return false
		}
		if last := x.first + x.n - 1; f.forgotten < 0 || age(last, next) < age(f.forgotten, next) {
			f.forgotten = last
		}
		return true
	})
}

// alike reports whether two errors are of one kind.
func alike(a, b error) bool {
	for _, kind := range []error{van.ErrTimeout, van.ErrPeerLost, van.ErrClosed, van.ErrQueueFull, van.ErrInvalid, van.ErrMalformed} {
		if errors.Is(a, kind) != errors.Is(b, kind) {
			return false
		}
	}
	return true
}

// find returns the error of the failed request that ts belongs to. known is false when it may have failed.
func (f *failures) find(ts, next int32) (err error, known bool) {
	i, at := slices.BinarySearchFunc(f.list, ts, byFirst)
	if !at {
		i--
	}
	if i >= 0 && ts-f.list[i].first < f.list[i].n {
		return f.list[i].err, true
	}
	return nil, f.forgotten < 0 || age(ts, next) < age(f.forgotten, next)
}

// clearReused forgets timestamps that are issued again, which ascend.
func (f *failures) clearReused(first, n int32) {
	i, at := slices.BinarySearchFunc(f.list, first, byFirst)
	if !at && i > 0 && f.list[i-1].first+f.list[i-1].n > first {
		i--
	}
	k, end := i, first+n
	for ; k < len(f.list) && f.list[k].first < end; k++ {
		if over := f.list[k].first + f.list[k].n - end; over > 0 {
			f.list[k].first, f.list[k].n = end, over
			break
		}
	}
	f.list = slices.Delete(f.list, i, k)
	if f.forgotten >= first && f.forgotten < end {
		f.forgotten = -1
	}
}

// age is the number of timestamps that have been issued since ts, up to next. After the largest timestamp follows 0.
func age(ts, next int32) int32 { return (next - 1 - ts) & math.MaxInt32 }
