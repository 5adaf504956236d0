package membership

import (
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/van"
)

func TestNoticeRoundTrip(t *testing.T) {
	for _, n := range []notice{
		{verb: verbError, text: "two nodes want rank 0"},
		{verb: verbWaiting, text: "after 5s: waiting"},
		{verb: verbDead, id: 8, text: "connection lost"},
		{verb: verbDead, id: 32766},
		{verb: verbCut, id: 9, text: "connection lost: reset"},
		{verb: verbBack, id: 9},
		{verb: verbBarrier, group: 7, instance: true, text: "server 0 is dead"},
		{verb: verbBarrier, group: 1, text: "x"},
		{verb: verbWithdraw, group: 4, instance: true},
		{verb: verbWithdraw, group: 1},
		{verb: verbWhether, group: 4, instance: true},
		{verb: verbWaits, group: 6},
		{verb: verbReleased, group: 7, instance: true},
	} {
		got, err := parseNotice(n.body())
		if err != nil || got != n {
			t.Errorf("%s: got %+v, %v; want %+v", n.body(), got, err, n)
		}
	}
}

func TestNoticeIsShortAndPrintable(t *testing.T) {
	n := notice{verb: verbError, text: "line\nbreak\x00\xff " + strings.Repeat("ä", maxNotice)}
	b := n.body()
	if len(b) > maxNotice {
		t.Errorf("%d bytes, want at most %d", len(b), maxNotice)
	}
	got, err := parseNotice(b)
	if err != nil || !strings.HasPrefix(got.text, "line break ? ää") {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestDownOfManyNodes: a notice that lists many dead nodes arrives whole.
func TestDownOfManyNodes(t *testing.T) {
	var ids []string
	for id := 8; id < van.Empty; id++ {
		ids = append(ids, strconv.Itoa(id))
	}
	got, err := parseNotice(notice{verb: verbDown, text: strings.Join(ids, ",")}.body())
	if err != nil || len(got.ids()) != len(ids) {
		t.Errorf("%d ids, %v; want %d", len(got.ids()), err, len(ids))
	}
}

func TestNoticeNonsense(t *testing.T) {
	for _, s := range []string{"x", "stepaf/1", "stepaf/1 ", "stepaf/2 error x", "stepaf/1 error", "stepaf/1 error ",
		"stepaf/1 waiting", "stepaf/1 dead", "stepaf/1 dead x y", "stepaf/1 dead 7 x", "stepaf/1 dead +8 x",
		"stepaf/1 dead 08 x", "stepaf/1 dead 32767 x", "stepaf/1 dead 99999999999999999999 x", "stepaf/1 back 8 x",
		"stepaf/1 back -8", "stepaf/1 barrier-failed", "stepaf/1 barrier-failed 0 group x", "stepaf/1 barrier-failed 8 group x",
		"stepaf/1 barrier-failed 7 both x", "stepaf/1 withdraw", "stepaf/1 withdraw 0 group", "stepaf/1 withdraw 7 both", "stepaf/1 withdraw 7 group x",
		"stepaf/1 error a\nb", "stepaf/1 error \xff", "STEPAF/1 error x", " stepaf/1 error x",
		"stepaf/1 error " + strings.Repeat("x", maxNotice), "stepaf/1 down 8" + strings.Repeat(",8", maxDown/2)} {
		n, err := parseNotice([]byte(s))
		if !errors.Is(err, van.ErrMalformed) || n != (notice{}) {
			t.Errorf("%.40q: %+v, %v; want ErrMalformed", s, n, err)
		}
	}
}

func FuzzNotice(f *testing.F) {
	f.Add([]byte("stepaf/1 barrier-failed 7 instance server 0 is dead"))
	f.Add([]byte("stepaf/1 dead 8 x"))
	f.Add([]byte("stepaf/1 back 8"))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := parseNotice(b)
		if err != nil {
			return
		}
		if again := string(n.body()); again != strings.TrimSuffix(string(b), " ") && again != string(b) {
			t.Errorf("%q reads as %+v, which writes %q", b, n, again)
		}
	})
}
