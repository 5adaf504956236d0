package real

// Test has the methods of a *testing.T that Begin needs.
type Test interface {
	Helper()
	Cleanup(func())
	Failed() bool
	Errorf(format string, args ...any)
	Logf(format string, args ...any)
	Fatal(args ...any)
}

// Begin starts a cluster, which ends with the test. Violations that its processes found fail the
// test. If it has failed, the timeline and the ends of the processes' logs are in its output.
func Begin(t Test, o Options) *Cluster {
	t.Helper()
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		for _, w := range c.Wrong() {
			t.Errorf("wrong: %s", w)
		}
		if t.Failed() {
			t.Logf("timeline:\n%s", c.Timeline())
			for _, p := range c.All() {
				log := p.Log()
				t.Logf("the end of the log of %s:\n%s", p, log[max(0, len(log)-3000):])
			}
		}
	})
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	return c
}
