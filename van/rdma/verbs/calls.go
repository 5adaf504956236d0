package verbs

// CallCounter is implemented by a Device that counts the calls that it has made into
// C: of Post and of Poll.
type CallCounter interface {
	Calls() (posts, polls uint64)
}
