//go:build !linux

package backend

import "time"

func nap(d time.Duration) { time.Sleep(d) }
