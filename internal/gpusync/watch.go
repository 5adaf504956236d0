package gpusync

import "time"

// watchEvery is the period of Watch.
const watchEvery = 100 * time.Millisecond

// Watch calls check periodically until over or ended is closed, and reports whether it was ended. check ends the exchanges whose streams make no
// progress. It must not call the driver, which may be blocked until such a stream continues.
func Watch(check func(), over, ended <-chan struct{}) bool {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-over:
			return false
		case <-ended:
			return true
		case <-tick.C:
			check()
		}
	}
}
