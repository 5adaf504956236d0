//go:build !nordma

package stack

import (
	_ "github.com/stepaf/stepaf-go/van/rdma" // registers itself
)
