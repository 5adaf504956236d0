package van

// How optional abilities are found through vans that wrap others.

// Wrapper is implemented by vans that wrap another one.
type Wrapper interface {
	// Unwrap returns the van inside.
	Unwrap() Van
}

// As finds the first van, from v inwards, that has the optional ability T, such
// as PeerWatcher or BufferRegistrar. Use it instead of a type assertion, which
// does not see the vans inside a wrapper.
func As[T any](v Van) (ability T, ok bool) {
	for v != nil {
		if ability, ok = v.(T); ok {
			return ability, true
		}
		w, wraps := v.(Wrapper)
		if !wraps {
			break
		}
		v = w.Unwrap()
	}
	return ability, false
}
