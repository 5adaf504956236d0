package bench

/*
#include "floor.h"
*/
import "C"

import (
	"encoding/base64"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/internal/memfd"
)

// The floor of shared memory is, each way, a copy into memory that both processes map, and then a flag. The server
// has a thread for each client.

// sharedLayout is the layout of a floor's memory: a part for each client, in each the flags, the pushed bytes, and the
// pulled bytes.
type sharedLayout struct{ push, pull int }

func (l sharedLayout) pushAt() int { return os.Getpagesize() }

func (l sharedLayout) pullAt() int { return l.pushAt() + l.pages(l.push) }

func (l sharedLayout) part() int { return l.pullAt() + l.pages(l.pull) }

func (sharedLayout) pages(n int) int {
	page := os.Getpagesize()
	return (n + page - 1) / page * page
}

// newSharedServer starts a server that answers the rounds of clients. The floor has n pairs altogether.
func newSharedServer(clients, n, push, pull int) (*floorServer, error) {
	l := sharedLayout{push, pull}
	fd, page, err := memfd.NewPage(clients * l.part())
	if err != nil {
		return nil, err
	}
	parts := slices.Collect(slices.Chunk(page.Mem, l.part()))
	var all sync.WaitGroup
	for _, mem := range parts {
		all.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			out := make([]byte, pull)
			fill(out)
			C.floor_shared_serve(chars(mem), C.size_t(l.pullAt()), chars(out), C.size_t(pull), C.int64_t(floorPoll(n)))
		})
	}
	addr := strconv.Itoa(clients) + ":" + base64.RawURLEncoding.EncodeToString(memfd.Name(fd))
	return serving(addr, func() {
		all.Wait()
		runtime.KeepAlive(page)
	}, func() {
		for _, mem := range parts {
			C.floor_shared_end(chars(mem))
		}
	}, func() { _ = unix.Close(fd) }), nil
}

// sharedPair is a client's part of a server's memory.
type sharedPair struct {
	l    sharedLayout
	page *memfd.Page
	mem  []byte // the part
	push []byte
	poll C.int64_t
}

// dialShared maps the memory of several servers of newSharedServer; client is the number of this client at each of them. The floor
// has n pairs altogether.
func dialShared(addrs []string, client, n, push, pull int) (*pairs, error) {
	return dialed(addrs, floorPoll(n), func(addr string) (floorPair, error) {
		count, text, _ := strings.Cut(addr, ":")
		clients, err := strconv.Atoi(count)
		if err != nil || client < 0 || client >= clients {
			return nil, fmt.Errorf("floor: address %q: no memory for client %d", addr, client)
		}
		name, err := base64.RawURLEncoding.DecodeString(text)
		if err != nil || len(name) != memfd.NameLen {
			return nil, fmt.Errorf("floor: address %q: want the name of a file in memory", addr)
		}
		x := &sharedPair{l: sharedLayout{push, pull}, push: make([]byte, push), poll: C.int64_t(floorPoll(n))}
		fill(x.push)
		size := x.l.part()
		if x.page, err = memfd.MapNamed(name, clients*size, true); err != nil {
			return nil, fmt.Errorf("floor: memory of the server: %w", err)
		}
		x.mem = x.page.Mem[client*size : (client+1)*size]
		return x, nil
	})
}

func (x *sharedPair) close() { x.mem, x.page = nil, nil }

func (x *sharedPair) rounds(gate *C.struct_floor_gate, n int, start, end *C.int64_t) error {
	defer runtime.KeepAlive(x.page)
	return errno(C.floor_shared_measure(chars(x.mem), C.size_t(x.l.pushAt()), chars(x.push), C.size_t(len(x.push)), x.poll, C.int(n),
		gate, start, end))
}
