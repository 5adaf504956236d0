//go:build !race

package local

// Stubs for builds without the race detector; see race.go.

type shadow struct{}

func newShadow(int) (shadow, error) { return shadow{}, nil }
func (shadow) drop()                {}
func (shadow) at(int) shadowWord    { return shadowWord{} }

type shadowWord struct{}

func (shadowWord) read()    {}
func (shadowWord) write()   {}
func (shadowWord) replace() {}

func written([]byte) {}
