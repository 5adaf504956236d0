package membership_test

import (
	"fmt"

	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
)

// A scheduler, a worker and a server find each other. Each machine's messages are
// handed to the others by address, as a transport would.
func ExampleMachine() {
	scheduler := van.Node{Hostname: "10.0.0.9", Port: 8123}
	machines := map[string]*membership.Machine{} // by address
	add := func(role van.Role, self van.Node) {
		m, err := membership.New(membership.Config{Role: role, NumWorkers: 1, NumServers: 1, Self: self, Scheduler: scheduler})
		if err != nil {
			fmt.Println(err)
			return
		}
		machines[self.Addr()] = m
		m.Start(0)
	}
	add(van.Scheduler, scheduler)
	add(van.Worker, van.Node{Hostname: "10.0.0.1", Port: 4000, AuxID: -1})
	add(van.Server, van.Node{Hostname: "10.0.0.2", Port: 4000, AuxID: -1})

	order := []string{"10.0.0.9:8123", "10.0.0.1:4000", "10.0.0.2:4000"}
	conns := map[string]map[int]string{}
	for _, a := range order {
		conns[a] = map[int]string{}
	}
	for range 3 { // registrations, tables, nothing left
		for _, addr := range order {
			from := machines[addr].ID()
			for _, o := range machines[addr].Take() {
				switch o := o.(type) {
				case membership.Connect:
					conns[addr][o.ID] = o.Node.Addr()
				case membership.Send:
					if err := machines[conns[addr][o.To]].Step(0, from, &o.Meta); err != nil {
						fmt.Println(err)
					}
				case membership.Assigned:
					fmt.Println(addr, "is", van.NodeName(o.ID))
				}
			}
		}
	}
	// Output:
	// 10.0.0.9:8123 is scheduler (id 1)
	// 10.0.0.1:4000 is worker 0 (id 9)
	// 10.0.0.2:4000 is server 0 (id 8)
}
