package membership

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

var (
	update = flag.Bool("update", false, "rewrite the expected output of the scripts, and what the stories are")
	story  = flag.Int("story", -1, "show this story of TestStories")
)

// TestScripts runs testdata/*.txt. A script has one command a line, its expected output in indented lines below it, and
// comments. Commands:
//
//	cluster workers=2 servers=2 [group=1] [heartbeat=1s timeout=3s natives=1 start=60s stop=9s
//	        replace=10s barrier=60s named=7 hosts=a,b]
//	add NAME ROLE [ADDR] [foreign] [rank=0] [resend=0] [version=3] [and the options of cluster, for this node only]
//	                     with resend the node announces its settings
//	                     foreign is a C++ StepMesh node
//	deliver [n=1] [to=NAME] [from=NAME] [cmd=ADD_NODE]
//	drop [n=1] [to=NAME] [from=NAME] [cmd=ADD_NODE]
//	late [n=1] [to=NAME] [from=NAME] [cmd=ADD_NODE]   arrives after all messages in flight
//	tick 5s              time passes; nothing is delivered
//	run 5s               time passes; everything is delivered at once
//	barrier NAME group=6 kind=group [customer=0]
//	stop NAME, finalize NAME, leaving NAME, cancel NAME BARRIER
//	link NAME ID...
//	startbarrier NAME 30s [group=7]
//	kill NAME            its process ends without notice
//	freeze NAME, thaw NAME   it is stopped and continued; messages to it are queued
//	busy NAME            only its transport answers, until thaw or freeze
//	lose NAME PEER [why=replaced]  NAME's transport loses the connection to PEER, or PEER refuses it
//	back NAME PEER       ... and restores it
//	data NAME PEER       NAME receives a data message of PEER
//	inject to=NAME from=ID cmd=BARRIER [group=9] [ts=2] [key=3] [request] [untagged] [by=NAME] [body="..."] [node="worker 9 host:port"]
//	report NAME, state NAME
//	verbose on|off       show messages and actions, not only events
func TestScripts(t *testing.T) {
	paths, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(paths) < 10 {
		t.Fatalf("%d scripts: %v", len(paths), err)
	}
	for _, p := range paths {
		t.Run(strings.TrimSuffix(filepath.Base(p), ".txt"), func(t *testing.T) { runScript(t, p) })
	}
}

func runScript(t *testing.T, path string) {
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	s := &script{w: &world{verbose: true}, base: Config{NumWorkers: 1, NumServers: 1,
		Scheduler: van.Node{Hostname: "10.0.0.99", Port: 8123}}}
	s.w.log = func(format string, args ...any) { got.WriteString("    " + fmt.Sprintf(format, args...) + "\n") }
	for _, line := range strings.Split(strings.TrimRight(string(b), "\n"), "\n") {
		if strings.HasPrefix(line, "    ") {
			continue // the expected output
		}
		got.WriteString(line + "\n")
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if err := s.command(line); err != nil {
			got.WriteString("    error: " + err.Error() + "\n")
		}
	}
	if strings.Contains(got.String(), "BUG") {
		t.Errorf("%s: the output says BUG", path)
	}
	if *update {
		if err := os.WriteFile(path, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if want := strings.TrimRight(string(b), "\n") + "\n"; got.String() != want {
		gl, wl := strings.Split(got.String(), "\n"), strings.Split(want, "\n")
		for i := range gl {
			if i >= len(wl) || gl[i] != wl[i] {
				w := "the end"
				if i < len(wl) {
					w = wl[i]
				}
				t.Fatalf("%s:%d: (run with -update to accept)\ngot  %s\nwant %s", path, i+1, gl[i], w)
			}
		}
		t.Fatalf("%s: output ends too early", path)
	}
}

type script struct {
	w    *world
	base Config
}

// args splits a command line into words and key=value pairs. Values may be
// quoted.
func args(line string) (words []string, opts map[string]string) {
	opts = map[string]string{}
	for line = strings.TrimSpace(line); line != ""; line = strings.TrimSpace(line) {
		end := strings.IndexByte(line, ' ')
		if q := strings.Index(line, `="`); q >= 0 && (end < 0 || q < end) {
			if close := strings.IndexByte(line[q+2:], '"'); close >= 0 {
				opts[line[:q]] = line[q+2:][:close]
				line = line[q+2+close+1:]
				continue
			}
		}
		if end < 0 {
			end = len(line)
		}
		word := line[:end]
		line = line[end:]
		if k, v, ok := strings.Cut(word, "="); ok {
			opts[k] = v
		} else {
			words = append(words, word)
		}
	}
	return words, opts
}

func (s *script) command(line string) error {
	w := s.w
	words, opts := args(line)
	arg := func(i int) string {
		if i < len(words) {
			return words[i]
		}
		return ""
	}
	switch words[0] {
	case "cluster":
		return configure(&s.base, opts)
	case "verbose":
		w.verbose = arg(1) == "on"
		return nil
	case "add":
		return s.add(words, opts)
	case "tick", "run":
		d, err := time.ParseDuration(arg(1))
		if err == nil {
			w.pass(d, words[0] == "run")
		}
		return err
	case "deliver":
		n, pick, err := choice(w, opts)
		if err == nil && w.deliver(n, pick) == 0 {
			w.log("(nothing)")
		}
		return err
	case "drop":
		return s.drop(opts)
	case "late":
		return s.late(opts)
	case "inject":
		return s.inject(words, opts)
	}
	n := w.node(arg(1))
	if n == nil {
		return fmt.Errorf("unknown command, or no node %q", arg(1))
	}
	defer w.take(n)
	switch words[0] {
	case "barrier", "stop", "finalize":
		customer, _ := strconv.Atoi(opts["customer"])
		group, _ := strconv.Atoi(opts["group"])
		var number int
		var err error
		switch words[0] {
		case "finalize":
			number, err = n.m.Finalize(w.now, customer)
		case "stop":
			number, err = n.m.StopBarrier(w.now, customer)
		default:
			number, err = n.m.Barrier(w.now, customer, group, opts["kind"] == "instance")
		}
		if err == nil {
			w.log("%s: barrier %d", n.name, number)
		}
		return err
	case "link":
		var ids []int
		for _, id := range words[2:] {
			k, err := strconv.Atoi(id)
			if err != nil {
				return err
			}
			ids = append(ids, k)
		}
		return n.m.Link(w.now, ids)
	case "cancel":
		number, err := strconv.Atoi(arg(2))
		n.m.CancelBarrier(number)
		return err
	case "leaving":
		n.m.Leaving(w.now)
	case "kill":
		n.dead = true
	case "freeze", "thaw":
		n.frozen, n.busy = words[0] == "freeze", false
	case "busy":
		n.frozen, n.busy = true, true
	case "startbarrier":
		limit, err := time.ParseDuration(arg(2))
		if err != nil {
			return err
		}
		group := van.AllNodes
		if g := opts["group"]; g != "" {
			if group, err = strconv.Atoi(g); err != nil {
				return err
			}
		}
		number, err := n.m.StartBarrier(w.now, group, w.now+limit)
		if err == nil {
			w.log("%s: barrier %d", n.name, number)
		}
		return err
	case "lose", "back", "unreachable", "data":
		id, ok := peerID(n, w.node(arg(2)))
		if !ok {
			return fmt.Errorf("%s has no connection to %q", n.name, arg(2))
		}
		switch words[0] {
		case "lose":
			cause := errors.New("connection reset")
			if opts["why"] == "replaced" {
				cause = fmt.Errorf("rejected by the peer: %w", van.ErrReplaced)
			}
			n.m.PeerLost(w.now, id, cause)
		case "back":
			n.m.PeerBack(w.now, id)
		case "data":
			n.m.DataFrom(w.now, id)
		default:
			n.m.ConnectFailed(w.now, id, errors.New("no route to host"))
		}
	case "report":
		w.log("%s", n.m.Report(w.now))
	case "state":
		var silent time.Duration
		if opts["silent"] != "" {
			var err error
			if silent, err = time.ParseDuration(opts["silent"]); err != nil {
				return err
			}
		}
		w.log("id=%d rank=%d ready=%t recovery=%t peers=%v dead=%v", n.m.ID(), n.m.Rank(), n.m.Ready(), n.m.IsRecovery(),
			n.m.KnownPeers(), n.m.DeadNodes(w.now, silent))
	default:
		return fmt.Errorf("unknown command %q", words[0])
	}
	return nil
}

// peerID is the id under which n is connected to p.
func peerID(n, p *testNode) (int, bool) {
	if p == nil {
		return 0, false
	}
	for id, c := range n.conns {
		if c.addr == p.addr {
			return id, true
		}
	}
	return 0, false
}

func (s *script) add(words []string, opts map[string]string) error {
	cfg := s.base
	role, ok := map[string]van.Role{"scheduler": van.Scheduler, "server": van.Server, "worker": van.Worker}[words[2]]
	if !ok {
		return fmt.Errorf("role %q", words[2])
	}
	cfg.Role = role
	cfg.Self.AuxID = -1
	if v, ok := opts["rank"]; ok {
		r, err := strconv.Atoi(v)
		if err != nil {
			return err
		}
		cfg.Self.AuxID = r
	}
	if i := slices.Index(words, "foreign"); i >= 0 {
		words = slices.Delete(words, i, i+1)
		opts["foreign"] = "1"
	}
	if len(words) > 3 {
		host, port, err := hostPort(words[3])
		if err != nil {
			return err
		}
		cfg.Self.Hostname, cfg.Self.Port = host, port
	}
	if err := configure(&cfg, opts); err != nil {
		return err
	}
	if opts["foreign"] != "" {
		cfg = foreign(cfg)
	}
	_, err := s.w.add(words[1], cfg)
	return err
}

func hostPort(s string) (string, int, error) {
	host, port, ok := strings.Cut(s, ":")
	p, err := strconv.Atoi(port)
	if !ok || err != nil {
		return "", 0, fmt.Errorf("address %q: want host:port", s)
	}
	return host, p, nil
}

func configure(cfg *Config, opts map[string]string) error {
	for k, v := range opts {
		var err error
		switch k {
		case "workers":
			cfg.NumWorkers, err = strconv.Atoi(v)
		case "servers":
			cfg.NumServers, err = strconv.Atoi(v)
		case "group":
			cfg.GroupSize, err = strconv.Atoi(v)
		case "heartbeat":
			cfg.HeartbeatInterval, err = time.ParseDuration(v)
		case "timeout":
			cfg.HeartbeatTimeout, err = time.ParseDuration(v)
		case "start":
			cfg.StartTimeout, err = time.ParseDuration(v)
		case "stop":
			cfg.StopTimeout, err = time.ParseDuration(v)
		case "hosts":
			cfg.OrderedHosts = strings.Split(v, ",")
		case "replace":
			cfg.ReplaceTimeout, err = time.ParseDuration(v)
		case "barrier":
			cfg.BarrierTimeout, err = time.ParseDuration(v)
		case "natives":
			cfg.NativeInterval, cfg.NativeTimeout = v == "1", v == "1"
		case "named": // STEPAF_CLUSTER_ID
			var n int
			n, err = strconv.Atoi(v)
			id := van.NodeExtension{Incarnation: 1, Cluster: uint32(n)}
			cfg.Self.Endpoint, cfg.NamedCluster = id.Encode(), true
		case "resend": // the node announces its settings
			id, _ := cfg.Self.Extension()
			id.Incarnation, id.Settings = 1, van.Settings{Known: true, Resend: v == "1"}
			cfg.Self.Endpoint = id.Encode()
		case "tls":
			id, _ := cfg.Self.Extension()
			id.Incarnation, id.Settings.Known, id.Settings.TLS = 1, true, v == "1"
			cfg.Self.Endpoint = id.Encode()
		case "version": // of another release; the rest is not known
			var n int
			n, err = strconv.Atoi(v)
			cfg.Self.Endpoint = append(binary.LittleEndian.AppendUint32([]byte("SAFN"), uint32(n)), make([]byte, 40)...)
		case "rank", "foreign":
		default:
			err = fmt.Errorf("unknown option %s", k)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// choice parses a selection of messages.
func choice(w *world, opts map[string]string) (n int, pick func(*packet) bool, err error) {
	n = 1 << 30
	if v, ok := opts["n"]; ok {
		n, err = strconv.Atoi(v)
	}
	to := ""
	if v := opts["to"]; v != "" {
		node := w.node(v)
		if node == nil {
			return 0, nil, fmt.Errorf("no node %q", v)
		}
		to = node.addr
	}
	return n, func(p *packet) bool {
		return (to == "" || p.to == to) && (opts["from"] == "" || p.name == opts["from"]) &&
			(opts["cmd"] == "" || p.meta.Control.Cmd.String() == opts["cmd"])
	}, err
}

func (s *script) drop(opts map[string]string) error {
	n, pick, err := choice(s.w, opts)
	var kept []packet
	for _, p := range s.w.queue {
		if n > 0 && pick(&p) {
			s.w.log("lost on the way: %s to %s: %s", p.name, p.to, showMeta(&p.meta))
			n--
			continue
		}
		kept = append(kept, p)
	}
	s.w.queue = kept
	return err
}

// late makes messages arrive after all others, like a lost message that is sent again.
func (s *script) late(opts map[string]string) error {
	n, pick, err := choice(s.w, opts)
	var kept, late []packet
	for _, p := range s.w.queue {
		if n > 0 && pick(&p) {
			late = append(late, p)
			n--
			continue
		}
		kept = append(kept, p)
	}
	s.w.queue = append(kept, late...)
	return err
}

func (s *script) inject(words []string, opts map[string]string) error {
	n := s.w.node(opts["to"])
	if n == nil {
		return fmt.Errorf("no node %q", opts["to"])
	}
	from, err := strconv.Atoi(opts["from"])
	if err != nil {
		from = van.Empty
	}
	var meta van.Meta
	meta.Reset()
	for c := van.EmptyCmd; c.Valid(); c++ {
		if c.String() == opts["cmd"] {
			meta.Control.Cmd = c
		}
	}
	meta.Timestamp = 0
	if v := opts["ts"]; v != "" {
		ts, err := strconv.Atoi(v)
		if err != nil {
			return err
		}
		meta.Timestamp = int32(ts)
	}
	meta.Key, _ = strconv.ParseUint(opts["key"], 10, 64)
	meta.Request = slices.Contains(words, "request")
	if !slices.Contains(words, "untagged") {
		meta.SetIncarnations(n.m.Incarnation(from), n.m.table.own.Incarnation)
	}
	if v := opts["by"]; v != "" { // that node's process sends it
		meta.SetIncarnations(s.w.node(v).m.table.own.Incarnation, n.m.table.own.Incarnation)
	}
	meta.Body = []byte(opts["body"])
	meta.Control.BarrierGroup, _ = strconv.Atoi(opts["group"])
	if v := opts["node"]; v != "" {
		var role, addr string
		rec := van.Node{AuxID: -1}
		if _, err := fmt.Sscanf(v, "%s %d %s", &role, &rec.ID, &addr); err != nil {
			return err
		}
		rec.Role = map[string]van.Role{"server": 0, "worker": 1, "scheduler": 2, "joint": 3}[role]
		if rec.Hostname, rec.Port, err = hostPort(addr); err != nil {
			return err
		}
		meta.Control.Nodes = []van.Node{rec}
	}
	if err := n.m.Step(s.w.now, from, &meta); err != nil {
		s.w.log("%s: dropped: %v", n.name, err)
	}
	s.w.take(n)
	return nil
}
