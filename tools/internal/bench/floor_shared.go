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

// sharedFloor is that floor. Its memory has a part for each client, in each the flags, the pushed bytes, and the pulled
// bytes.
type sharedFloor struct {
	floors
	client int // the number of this client at each server
}

func (x sharedFloor) pushAt() int { return os.Getpagesize() }

func (x sharedFloor) pullAt() int { return x.pushAt() + wholePages(x.push) }

func (x sharedFloor) part() int { return x.pullAt() + wholePages(x.pull) }

func wholePages(n int) int {
	page := os.Getpagesize()
	return (n + page - 1) / page * page
}

// serve starts a server that answers the rounds of all clients.
func (x sharedFloor) serve() (*floorServer, error) {
	fd, page, err := memfd.NewPage(x.clients * x.part())
	if err != nil {
		return nil, err
	}
	parts := slices.Collect(slices.Chunk(page.Mem, x.part()))
	var all sync.WaitGroup
	for _, mem := range parts {
		all.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			out := make([]byte, x.pull)
			fill(out)
			C.floor_shared_serve(chars(mem), C.size_t(x.pullAt()), chars(out), C.size_t(x.pull), C.int64_t(x.poll()))
		})
	}
	addr := strconv.Itoa(x.clients) + ":" + base64.RawURLEncoding.EncodeToString(memfd.Name(fd))
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
	sharedFloor
	page *memfd.Page
	mem  []byte // the part
	out  []byte // the pushed bytes
}

// dial maps the memory of the servers.
func (x sharedFloor) dial(addrs []string) (baseline, error) {
	all, err := dialAll(addrs, func(addr string) (floorPair, error) {
		count, text, _ := strings.Cut(addr, ":")
		clients, err := strconv.Atoi(count)
		if err != nil || x.client >= clients {
			return nil, fmt.Errorf("floor: address %q: no memory for client %d", addr, x.client)
		}
		name, err := base64.RawURLEncoding.DecodeString(text)
		if err != nil || len(name) != memfd.NameLen {
			return nil, fmt.Errorf("floor: address %q: want the name of a file in memory", addr)
		}
		size := x.part()
		page, err := memfd.MapNamed(name, clients*size, true)
		if err != nil {
			return nil, fmt.Errorf("floor: memory of the server: %w", err)
		}
		out := make([]byte, x.push)
		fill(out)
		return &sharedPair{x, page, page.Mem[x.client*size : (x.client+1)*size], out}, nil
	})
	return &pairs{all, x.poll()}, err
}

func (x *sharedPair) close() { x.mem, x.page = nil, nil }

func (x *sharedPair) rounds(gate *C.struct_floor_gate, n int, start, end *C.int64_t) error {
	defer runtime.KeepAlive(x.page)
	return errno(C.floor_shared_measure(chars(x.mem), C.size_t(x.pushAt()), chars(x.out), C.size_t(x.push), C.int64_t(x.poll()), C.int(n),
		gate, start, end))
}
