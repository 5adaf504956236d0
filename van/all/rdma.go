//go:build !nordma

package all

import (
	_ "github.com/stepaf/stepaf-go/van/rdma" // registers "ibverbs"
)
