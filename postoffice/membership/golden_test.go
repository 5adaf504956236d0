package membership

import (
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/tests/golden"
)

// TestParsersGolden: the parsing of arbitrary notices, policies and answers, and their written form.
func TestParsersGolden(t *testing.T) {
	words := []string{"", "0", "1", "7", "8", "9", "07", "+8", "-1", "32766", "32767", "2147483647", "2147483648", "4294967295", "4294967296", "99999999999999999999",
		"999", "1000", "1000000000000", "1000000000001", "63", "64", "ring", "rank", "instance", "group", "both", "table", "x", "a b", "8,9", "8,,9", "8,x", "ä", "\x00", "\xff", "peer=9", "app=7",
		"peer=9,rate=1000", "10.0.0.1:80", "[::1]:80", "host:0", "[fe80::1%eth0]:5", "list", "clear all", "clear peer=9", "set peer=9,rate=5000"}
	verbs := []string{verbError, verbWaiting, verbDead, verbCut, verbBack, verbDown, verbRejoin, verbBarrier, verbWithdraw, verbWhether, verbWaits, verbReleased, verbPolicies, verbHave, verbRegistered, verbRegister, verbAsk, verbAnswer, "given-up", ""}
	word := func(rng *rand.Rand) string { return words[rng.IntN(len(words))] }
	golden.Check(t, "parsers", 20, func(rng *rand.Rand, w io.Writer) {
		for range 150 {
			var text []string
			for range rng.IntN(4) {
				text = append(text, word(rng))
			}
			s := noticePrefix + verbs[rng.IntN(len(verbs))]
			if rng.IntN(10) > 0 {
				s += " "
			}
			s += strings.Join(text, " ")
			if rng.IntN(30) == 0 {
				s += strings.Repeat("x", max(maxNotice-len(s)+rng.IntN(3)-1, 0))
			}
			b := []byte(s)
			if rng.IntN(6) == 0 {
				b = golden.Mangle(rng, b)
			}
			n, err := parseNotice(b)
			fmt.Fprintln(w, n, golden.Err(err))
			if err == nil {
				fmt.Fprintf(w, "%s %v\n", n.body(), n.ids())
			}
			target := []string{"peer=", "app=", "x=", ""}[rng.IntN(4)] + word(rng)
			for range rng.IntN(4) {
				target += "," + []string{"rate=", "class=", "order=", "x=", "peer="}[rng.IntN(5)] + word(rng)
			}
			p, err := ParsePolicy(target)
			fmt.Fprintln(w, p, golden.Err(err))
			if err == nil {
				fmt.Fprintln(w, p.String(), p.Target())
			}
			version, list, err := parsePolicies(word(rng) + []string{"", " "}[rng.IntN(2)] + word(rng))
			fmt.Fprintln(w, version, list, golden.Err(err))
			number, answer, ok := Answer([]byte(noticePrefix + verbAnswer + " " + word(rng) + " " + word(rng)))
			fmt.Fprintln(w, number, answer, ok)
			number, answer, ok = Answer(b)
			fmt.Fprintln(w, number, answer, ok)
			fmt.Fprintf(w, "%s\n", Question(rng.Uint32(), word(rng), word(rng)))
			if rng.IntN(15) > 0 {
				continue
			}
			long := notice{verb: verbError, text: strings.Repeat("ä", rng.IntN(10)) + strings.Repeat("x", maxNotice-rng.IntN(40)) + strings.Repeat("ä", 20)}
			fmt.Fprintf(w, "%x\n", long.body())
		}
	})
}
