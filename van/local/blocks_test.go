package local

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestBlockLen(t *testing.T) {
	for _, c := range []struct{ n, want int }{
		{0, minBlock}, {1, minBlock}, {minBlock, minBlock}, {minBlock + 1, minBlock + 8192},
		{917504, 917504}, {1 << 20, 1 << 20}, {1<<20 + 1, 1<<20 + 1<<17}, {1<<31 - 1, 1 << 31},
	} {
		if got := blockLen(c.n); got != c.want {
			t.Errorf("blockLen(%d) = %d, want %d", c.n, got, c.want)
		}
	}
	for n := 1; n < 64<<20; n += n/3 + 1 {
		if got := blockLen(n); got < n || got > max(n+n/8+4096, minBlock) {
			t.Errorf("blockLen(%d) = %d, want at most an eighth more", n, got)
		}
	}
}

func TestBlocksAreUsedAgain(t *testing.T) {
	var b blocks
	first, err := b.get(100_000)
	if err != nil {
		t.Fatal(err)
	}
	first[99_999] = 1
	b.put(first)
	again, err := b.get(99_000)
	if err != nil {
		t.Fatal(err)
	}
	if &again[0] != &first[0] || len(again) != 99_000 {
		t.Errorf("a block of %d bytes at %p, want the one at %p again", len(again), &again[0], &first[0])
	}
	b.close()
	b.put(again) // frees it
	if b.kept != 0 {
		t.Errorf("%d bytes are kept after close", b.kept)
	}
}

func TestBlocksAreBounded(t *testing.T) {
	var b blocks
	defer b.close()
	huge, err := b.get(keepBlocks + 1)
	if err != nil {
		t.Fatal(err)
	}
	b.put(huge)
	if b.kept != 0 {
		t.Errorf("%d bytes are kept, more than the bound of %d", b.kept, keepBlocks)
	}
}

// take gets n blocks of a MiB and gives them back.
func take(t *testing.T, b *blocks, n int) {
	t.Helper()
	var held [][]byte
	for range n {
		mem, err := b.get(1 << 20)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, mem)
	}
	for _, mem := range held {
		b.put(mem)
	}
}

// keeps is how many MiB wait for use.
func (b *blocks) keeps() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.kept >> 20
}

// TestBlocksGoBack: as many blocks are kept as the traffic uses at a time, and none after the traffic has ended.
func TestBlocksGoBack(t *testing.T) {
	var b blocks
	defer b.close()
	for range 20 {
		take(t, &b, 8)
	}
	if n := b.keeps(); n != 8 {
		t.Errorf("%d blocks are kept, want the 8 that are used at a time", n)
	}
	for range 16 {
		take(t, &b, 2)
	}
	if n := b.keeps(); n != 2 {
		t.Errorf("%d blocks are kept, want the 2 that are used at a time now", n)
	}
	b.tick()
	if n := b.keeps(); n != 2 {
		t.Errorf("%d blocks are kept after a while with traffic, want 2", n)
	}
	b.tick()
	if n := b.keeps(); n != 0 || len(b.of) != 0 {
		t.Errorf("%d blocks of %d lengths are kept after a while without traffic, want none", n, len(b.of))
	}
}

// TestBlocksGoBackByThemselves: when the traffic has ended all blocks are freed, without a call.
func TestBlocksGoBackByThemselves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b blocks
		defer b.close()
		for range 2 { // also after a time without any
			take(t, &b, 8)
			time.Sleep(2*keepTime + 1)
			if n := b.keeps(); n != 0 {
				t.Errorf("%d blocks are kept %s after the last use, want none", n, 2*keepTime)
			}
		}
	})
}
