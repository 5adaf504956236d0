//go:build !linux

package backend

import "time"

func sleep(d time.Duration) { time.Sleep(d) }
