package kv

// Key names a value. Keys up to the largest uint64 may be used.
type Key = uint64

// MaxKey is the largest key.
const MaxKey Key = 1<<64 - 1
