package backend_test

import (
	"fmt"
	"sync/atomic"

	"github.com/stepaf/stepaf-go/van/backend"
)

// counted is a device of its own: host memory that counts what is allocated. All methods
// that it does not have are those of the CPU backend.
type counted struct {
	backend.Backend
	bytes atomic.Int64
}

func (c *counted) Name() string { return "COUNTED" }

func (c *counted) Alloc(n int) (backend.Mem, error) {
	c.bytes.Add(int64(n))
	return c.Backend.Alloc(n)
}

// A program registers its device in init. STEPMESH_BAKCEND=COUNTED then selects it.
func ExampleRegister() {
	backend.Register("COUNTED", func(id int) (backend.Backend, error) {
		return &counted{Backend: backend.NewCPU()}, nil
	})
	b, err := backend.New("counted", 0)
	if err != nil {
		fmt.Println(err)
		return
	}
	m, err := b.Alloc(4096)
	fmt.Println(b.Name(), m.Len(), b.(*counted).bytes.Load(), err)
	// Output: COUNTED 4096 4096 <nil>
}
