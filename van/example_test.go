package van_test

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/env"
)

// Two transports of one network send a message from one to the other.
func ExampleVan() {
	ctx, network := context.Background(), inproc.NewNetwork()
	open := func(id, port int, recv van.Receiver) van.Van {
		v, err := network.Factory()(van.Options{Config: env.Default(), Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			panic(err)
		}
		if _, err := v.Bind(ctx, van.Node{Role: van.RoleOf(id), ID: id, Hostname: "a-host", Port: port}); err != nil {
			panic(err)
		}
		v.Start(recv)
		v.SetID(id)
		return v
	}
	got := make(chan string, 1)
	server := open(van.ServerID(0), 1, func(m *van.Message) { // m is valid until this returns
		got <- fmt.Sprintf("%q of %s, key %d", m.Vals.Host(), van.NodeName(m.Sender), m.Key)
	})
	defer server.Close(ctx)
	worker := open(van.WorkerID(0), 2, func(*van.Message) {})
	defer worker.Close(ctx)
	if err := worker.Connect(ctx, van.ServerID(0), van.Node{Role: van.Server, ID: van.ServerID(0), Hostname: "a-host", Port: 1}); err != nil {
		panic(err)
	}
	m := &van.Message{}
	m.Reset()
	m.Receiver, m.Request, m.Push, m.Key = van.ServerID(0), true, true, 7
	m.DataTypes = append(m.DataTypes, van.TypeUint64, van.TypeChar)
	m.Frames, m.Keys, m.Vals = 2, backend.Bytes(make([]byte, 8)), backend.Bytes([]byte("hello"))
	m.DataSize = int32(m.PayloadLen())
	if err := worker.Send(m); err != nil {
		panic(err)
	}
	fmt.Println(<-got)
	// Output: "hello" of worker 0 (id 9), key 7
}
