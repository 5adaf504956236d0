// Command checkpoint is a key-value server with a rule of its own: a push is a step of
// gradient descent. On request each server writes its values to a file, which it reads
// when it is started again.
package main

import (
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"os"
	"slices"
	"sync"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
)

const width = 2 // values of a key

// store has the values of one server.
type store struct {
	saving sync.Mutex // held by save
	mu     sync.Mutex // guards values
	values map[kv.Key][]float32
}

// handle is the server's handler: a push subtracts a tenth of the gradient, a pull gets the values.
func (s *store) handle(r kv.Request[float32]) {
	if r.Push && (len(r.Lens) > 0 || len(r.Vals) != width*len(r.Keys)) {
		report(r.Refuse(fmt.Errorf("want %d values for each of %d keys, no lengths", width, len(r.Keys))))
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	answer := kv.Pairs[float32]{} // empty for a push
	for i, key := range r.Keys {
		v := s.values[key]
		if v == nil {
			v = make([]float32, width)
		}
		if r.Push {
			s.values[key] = v
			for j, gradient := range r.Vals[i*width : (i+1)*width] {
				v[j] -= 0.1 * gradient
			}
		} else {
			answer.Vals = append(answer.Vals, v...)
		}
	}
	if !r.Push {
		answer.Keys = r.Keys
	}
	report(r.Respond(answer))
}

// save writes a new file and renames it, so that no half-written file is read. Concurrent saves take turns.
func (s *store) save(file string) error {
	s.saving.Lock()
	defer s.saving.Unlock()
	f, err := os.Create(file + ".new")
	if err != nil {
		return err
	}
	s.mu.Lock()
	err = gob.NewEncoder(f).Encode(s.values)
	s.mu.Unlock()
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

func (s *store) load(file string) error {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the first start
	} else if err != nil {
		return err
	}
	defer f.Close()
	err = gob.NewDecoder(f).Decode(&s.values)
	for key, v := range s.values {
		if err == nil && len(v) != width {
			err = fmt.Errorf("%s: key %d: want %d values", file, key, width)
		}
	}
	return err
}

func main() {
	ctx := context.Background()
	cfg, err := postoffice.LoadConfig()
	check(err)
	node, err := postoffice.Start(ctx, postoffice.Options{Config: cfg})
	check(err)
	switch node.Role() {
	case postoffice.Server:
		file := fmt.Sprintf("%s.%d", os.Args[1], node.Rank()) // each server has its own keys
		s := &store{values: map[kv.Key][]float32{}}
		check(s.load(file))
		server, err := kv.NewServer[float32](node, kv.ServerOptions{})
		check(err)
		server.SimpleApp().Handle(func(m kv.SimpleMessage) {
			if err := s.save(file); err != nil {
				report(m.Refuse(err))
				return
			}
			report(m.Respond(nil))
		})
		check(server.Handle(s.handle))
	case postoffice.Worker:
		worker, err := kv.NewWorker[float32](node, kv.WorkerOptions{})
		check(err)
		keys := []kv.Key{kv.SpreadKey(0), kv.SpreadKey(1)}
		slices.Sort(keys)
		push, err := worker.Push(keys, []float32{1, 2, 3, 4})
		check(err)
		check(push.Wait(ctx))
		var values []float32
		pull, err := worker.Pull(keys, &values)
		check(err)
		check(pull.Wait(ctx))
		fmt.Println("values", values)
		saved, err := worker.SimpleApp().Request(0, nil, postoffice.ServerGroup) // all servers
		check(err)
		check(saved.Wait(ctx))
	}
	check(node.Shutdown(ctx))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// report logs why an answer was not sent, for example because its worker was lost. The server goes on.
func report(err error) {
	if err != nil {
		log.Print(err)
	}
}
