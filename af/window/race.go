//go:build race

package window

// watched says that the race detector is on. It does not see that one mapping of a page of host memory is another one, of
// two ranks in one process: they must hear of each other by a word of the device.
const watched = true
