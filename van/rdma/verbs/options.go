package verbs

import "log/slog"

// Options says how Load is to work. The zero value is good.
type Options struct {
	Log *slog.Logger // what was found and what was not; nil: nobody wants to know

	// Where things are, for tests. Empty: where they always are.
	libVerbs, libCM, libMLX5 string
	sysfs, dev               string
}

// CallCounter is implemented by a Device that counts the calls that it has made into
// C: of Post and of Poll.
type CallCounter interface {
	Calls() (posts, polls uint64)
}
