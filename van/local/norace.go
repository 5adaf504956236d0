//go:build !race

package local

func published() {}
func noticed()   {}
