package local

import "testing"

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
	if b.kept != 0 || len(b.free) != 0 {
		t.Errorf("%d bytes are kept after close", b.kept)
	}
	huge, err := b.get(keepBlocks + 1)
	if err != nil {
		t.Fatal(err)
	}
	b.closed = false
	b.put(huge)
	if b.kept != 0 {
		t.Errorf("%d bytes are kept, more than the bound of %d", b.kept, keepBlocks)
	}
}
