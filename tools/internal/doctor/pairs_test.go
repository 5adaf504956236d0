package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stepaf/stepaf-go/van/backend"
)

// fakeGPU is a backend whose memory is a memfd, so that another process can import it.
type fakeGPU struct {
	backend.Backend // of the host, for events
	id              int
	mode            string // the planted error

	mu   sync.Mutex
	fds  map[uint64]int // of Alloc, by address
	maps map[uint64][]byte
}

func openFake(id int, mode string) (backend.Backend, error) {
	if mode == "exclusive" {
		return nil, fmt.Errorf("backend GPU: %w", &backend.DeviceError{Device: gpuDevice(id), Op: "open", Call: "cuDevicePrimaryCtxRetain", Code: 46,
			Name: "CUDA_ERROR_DEVICE_UNAVAILABLE"})
	}
	return &fakeGPU{Backend: backend.NewCPU(), id: id, mode: mode, fds: map[uint64]int{}, maps: map[uint64][]byte{}}, nil
}

func gpuDevice(id int) backend.Device { return backend.Device{Type: backend.GPU, ID: int32(id)} }

func (g *fakeGPU) Device() backend.Device { return gpuDevice(g.id) }

func (g *fakeGPU) mapped(fd, n int) (backend.Mem, error) {
	b, err := unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return backend.Mem{}, err
	}
	m := backend.At(unsafe.Pointer(&b[0]), n, g.Device(), nil)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.maps[m.Addr()] = b
	return m, nil
}

func (g *fakeGPU) Alloc(n int) (backend.Mem, error) {
	if g.mode == "full" {
		return backend.Mem{}, &backend.DeviceError{Device: g.Device(), Op: "Alloc", Call: "cuMemAlloc", Code: 2, Name: "CUDA_ERROR_OUT_OF_MEMORY", Kind: backend.ErrNoMemory}
	}
	fd, err := unix.MemfdCreate("gpu", 0)
	if err != nil {
		return backend.Mem{}, err
	}
	if err := unix.Ftruncate(fd, int64(n)); err != nil {
		return backend.Mem{}, err
	}
	m, err := g.mapped(fd, n)
	g.fds[m.Addr()] = fd
	return m, err
}

func content(m backend.Mem) []byte { return unsafe.Slice((*byte)(m.Ptr()), m.Len()) }

func (g *fakeGPU) Copy(dst, src backend.Mem) error {
	copy(content(dst), content(src))
	return nil
}

func (g *fakeGPU) Close() error {
	var errs []error
	for _, b := range g.maps {
		errs = append(errs, unix.Munmap(b))
	}
	for _, fd := range g.fds {
		errs = append(errs, unix.Close(fd))
	}
	if g.mode == "sticky" {
		errs = append(errs, errors.New("this GPU does not close"))
	}
	return errors.Join(errs...)
}

func (g *fakeGPU) Export(m backend.Mem) (backend.Export, error) {
	e := backend.Export{Base: m.Addr(), Size: m.Len(), Allocation: 1<<63 + 1}
	copy(e.Handle[:], fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), g.fds[m.Addr()]))
	return e, nil
}

func (g *fakeGPU) Import(e backend.Export) (backend.Mem, error) {
	switch g.mode {
	case "unreachable":
		return backend.Mem{}, &backend.DeviceError{Device: g.Device(), Op: "Import of memory", Call: "cuIpcOpenMemHandle", Code: 217,
			Name: "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", Detail: "the handle is stale, or not", Kind: backend.ErrNotExportable}
	case "hang":
		select {}
	case "crash":
		fmt.Fprintf(os.Stderr, "a stack\n\nout of luck\n")
		os.Exit(3)
	}
	name, _, _ := strings.Cut(string(e.Handle[:]), "\x00")
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return backend.Mem{}, err
	}
	defer f.Close()
	return g.mapped(int(f.Fd()), e.Size)
}

func (g *fakeGPU) CloseImport(m backend.Mem) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	b := g.maps[m.Addr()]
	delete(g.maps, m.Addr())
	return unix.Munmap(b)
}

func (g *fakeGPU) NewStream() (uintptr, error) { return 1, nil }
func (g *fakeGPU) FreeStream(uintptr) error    { return nil }
func (g *fakeGPU) CopyRecord(dst, src backend.Mem, stream uintptr, e backend.Event) error {
	return errors.Join(g.CopyAsync(dst, src, stream), e.Record(stream))
}

func (g *fakeGPU) CopyAsync(dst, src backend.Mem, _ uintptr) error {
	copy(content(dst), content(src))
	if g.mode == "garbled" {
		content(dst)[dst.Len()-1]++
	}
	return nil
}

// TestMain is also the other process of a pair: its arguments are the command and the error of each GPU, as
// "mode/mode".
func TestMain(m *testing.M) {
	if len(os.Args) != 3 || os.Args[1] != pairCommand {
		os.Exit(m.Run())
	}
	modes := strings.Split(os.Args[2], "/")
	if err := servePairs(context.Background(), os.Stdin, os.Stdout, func(id int) (backend.Backend, error) { return openFake(id, modes[id]) }); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// inProcesses is a machine whose GPUs are fake, but whose children are processes.
func inProcesses(t *testing.T, parent, child string) *Machine {
	m := withGPUs()
	m.PairBytes = 256 << 10
	modes := strings.Split(parent, "/")
	m.OpenGPU = func(id int) (backend.Backend, error) { return openFake(id, modes[id]) }
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	m.PairChild = func(ctx context.Context, request []byte) ([]byte, error) {
		cmd := exec.CommandContext(ctx, self, pairCommand, child)
		cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0") // else a second at each end
		return runChild(cmd, request)
	}
	return m
}

// TestPairsProcesses: one process exports memory; another one imports, copies and compares it. Every result is
// reported.
func TestPairsProcesses(t *testing.T) {
	const direct = "directly (CUDA IPC, "
	for _, x := range []struct {
		name          string
		parent, child string
		want          map[string]string // by pair, part of the text
		remedy        string            // part of the remedy for pairs that are not direct
		status        Status            // of the same
		tensors       string
	}{
		{"all work", "/", "/", map[string]string{
			"gpu 0 -> gpu 0": "two processes on one GPU): ", "gpu 1 -> gpu 0": direct + "NVLink or PCIe", "gpu 0 -> gpu 1": " for 1 KiB, ", "gpu 1 -> gpu 1": direct,
		}, "", OK, "go to nodes of this host directly GPU to GPU; to others through pinned host memory"},
		{"unreachable", "/", "/unreachable", map[string]string{
			"gpu 0 -> gpu 0": direct, "gpu 1 -> gpu 0": direct,
			"gpu 0 -> gpu 1": "through pinned memory: cuIpcOpenMemHandle: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)",
		}, "IOMMU", Warn, "directly GPU to GPU for the pairs above that support it, else through pinned"},
		{"garbled", "/", "garbled/garbled", map[string]string{
			"gpu 1 -> gpu 0": "CUDA IPC delivers wrong values: bytes differ from byte 262136 of 262144 on",
		}, "BYTEPS_ENABLE_IPC=0", Fail, "this host through pinned host memory"},
		{"exclusive", "/", "exclusive/exclusive", map[string]string{
			"gpu 1 -> gpu 1": "through pinned memory: cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE (46)",
		}, "nvidia-smi -c DEFAULT", Warn, "this host through pinned host memory"},
		{"full", "full/", "/full", map[string]string{
			"gpu 0 -> gpu 0": "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2)", "gpu 1 -> gpu 0": direct, "gpu 1 -> gpu 1": "CUDA_ERROR_OUT_OF_MEMORY",
		}, "which process uses the GPU's memory", Warn, "for the pairs above"},
		{"crash", "/", "crash/", map[string]string{
			"gpu 0 -> gpu 0": "not known: the other process: exit status 3; out of luck", "gpu 0 -> gpu 1": direct,
		}, "again", Warn, "directly GPU to GPU where CUDA IPC works, else"},
	} {
		t.Run(x.name, func(t *testing.T) {
			r := examine(t, inProcesses(t, x.parent, x.child))
			for name, text := range x.want {
				f := find(t, r, name)
				if !strings.Contains(f.Text, text) {
					t.Errorf("%s: %q, want %q", name, f.Text, text)
				}
				if strings.Contains(f.Text, direct) {
					p := f.Data.(pairResult)
					if f.Status != OK || p.SmallNS <= 0 || p.BytesPerSecond <= 0 || p.Fault != nil {
						t.Errorf("%s: %+v", name, f)
					}
				} else if f.Status != x.status || !strings.Contains(f.Remedy, x.remedy) {
					t.Errorf("%s: %s, remedy %q; want %s, %q", name, f.Status, f.Remedy, x.status, x.remedy)
				}
			}
			if f := find(t, r, "gpu tensors"); !strings.Contains(f.Text, x.tensors) {
				t.Errorf("gpu tensors %q, want %q", f.Text, x.tensors)
			}
		})
	}
}

// TestPairsSticky: a GPU that cannot be closed is reported.
func TestPairsSticky(t *testing.T) {
	r := examine(t, inProcesses(t, "/sticky", "/"))
	if f := find(t, r, gpuPairs); f.Status != Warn || f.Text != "after the attempt: this GPU does not close" {
		t.Errorf("%+v", f)
	}
}

// TestPairsHang: a child that hangs is ended with doctor; its earlier results are kept.
func TestPairsHang(t *testing.T) {
	m := inProcesses(t, "/", "hang/hang")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	child := m.PairChild
	m.PairChild = func(ctx context.Context, request []byte) ([]byte, error) {
		cancel(errors.New("enough"))
		out, err := child(ctx, request)
		return append([]byte(`{"from":0,"to":0,"copy_1kib_ns":6200,"bytes_per_second":2e12}`+"\n"), out...), err
	}
	begin := time.Now()
	r, err := Run(ctx, m, func(Finding) {})
	if err == nil || time.Since(begin) > childTime {
		t.Errorf("%v after %v", err, time.Since(begin))
	}
	if f := find(t, r, "gpu 0 -> gpu 0"); f.Status != OK || !strings.HasSuffix(f.Text, ": 6.2µs for 1 KiB, 2000 GB/s") {
		t.Errorf("%+v", f)
	}
	if f := find(t, r, "gpu 1 -> gpu 0"); f.Status != Warn || f.Text != "not known: enough" {
		t.Errorf("%+v", f)
	}
	if f := find(t, r, gpuPairs); f.Status != Warn || f.Text != "not tried to GPU 1: enough" {
		t.Errorf("%+v", f)
	}
}

// saying is a machine with n GPUs whose child prints the result of answer.
func saying(n int, answer func(from, to int) string, environ ...string) *Machine {
	m := withGPUs(environ...)
	all, err := m.GPUs()
	for i := len(all); i < n; i++ {
		g := all[0]
		g.Device, g.UUID, g.Peers = gpuDevice(i), fmt.Sprintf("GPU-%d", i+1), nil
		for p := range n {
			if p != i {
				g.Peers = append(g.Peers, p)
			}
		}
		all = append(all, g)
	}
	m.GPUs = func() ([]backend.Info, error) { return all, err }
	m.PairBytes = 4096
	m.OpenGPU = func(id int) (backend.Backend, error) { return openFake(id, "") }
	m.PairChild = func(_ context.Context, request []byte) (out []byte, err error) {
		var req pairRequest
		if err := json.Unmarshal(request, &req); err != nil {
			return nil, err
		}
		for _, s := range req.Sources {
			if a := answer(s.From, req.To); a != "" {
				out = append(out, a+"\n"...)
			}
		}
		return out, nil
	}
	return m
}

func answerOf(from, to int) string {
	return fmt.Sprintf(`{"from":%d,"to":%d,"copy_1kib_ns":%d,"bytes_per_second":%d}`, from, to, 6000+100*from+10*to, int64(380-from-10*to)*1e9)
}

// eightGPUs has defects of three kinds.
func eightGPUs(from, to int) string {
	switch {
	case to == 3 && from > 3:
		return fmt.Sprintf(`{"from":%d,"to":3,"fault":{"error":"gpu:3: Import: cuIpcOpenMemHandle: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)",`+
			`"call":"cuIpcOpenMemHandle","code":217,"name":"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"}}`, from)
	case to == 5 && from == 6:
		return `{"from":6,"to":5,"fault":{"error":"bytes differ from byte 8 of 67108864 on","kind":"wrong bytes"}}`
	case to == 7 && from > 1:
		return ""
	}
	return answerOf(from, to)
}

// TestPairAnswers: an invalid line of a child is reported, and is not a result.
func TestPairAnswers(t *testing.T) {
	for _, answer := range []string{"noise", `{"from":0,"to":9}`} {
		f := find(t, examine(t, saying(2, func(int, int) string { return answer })), "gpu 0 -> gpu 1")
		if f.Status != Warn || !strings.HasPrefix(f.Text, "not known: the other process has written ") || !strings.Contains(f.Text, "want a result for GPU 1") {
			t.Errorf("%s: %+v", answer, f)
		}
	}
	f := find(t, examine(t, saying(2, func(int, int) string { return "" })), "gpu 0 -> gpu 1")
	if f.Text != "not known: the other process has ended without an answer" {
		t.Errorf("%+v", f)
	}
}

// TestPairRemedies: each fault with a known remedy names it.
func TestPairRemedies(t *testing.T) {
	for _, x := range []struct {
		f       pairFault
		to      int
		reaches bool
		want    string
	}{
		{pairFault{Kind: faultLost}, 1, true, "Xid"},
		{pairFault{Code: cudaInvalidDevice}, 1, true, "CUDA_VISIBLE_DEVICES"},
		{pairFault{Code: 1}, 1, false, "IOMMU"},
		{pairFault{Code: 1}, 0, false, "but slower"}, // a GPU is not a peer of itself
		{pairFault{Code: 1}, 1, true, "but slower"},
		{pairFault{Code: cudaOperatingSystem}, 1, true, "same user"},
		{pairFault{Kind: faultUnsupported}, 1, true, "vGPU"},
	} {
		if got := pairRemedy(pairResult{To: x.to, Fault: &x.f}, x.reaches); !strings.Contains(got, x.want) {
			t.Errorf("%+v to %d, reaches %v: %q, want %q", x.f, x.to, x.reaches, got, x.want)
		}
	}
}

// TestServePairsRefuses: an invalid request is an error; a request that fails is a result.
func TestServePairsRefuses(t *testing.T) {
	open := func(id int) (backend.Backend, error) { return openFake(id, "") }
	for _, in := range []string{"", "{}", `{"bytes":1025}`, `{"bytes":-8}`} {
		if err := servePairs(t.Context(), strings.NewReader(in), &bytes.Buffer{}, open); err == nil || !strings.Contains(err.Error(), pairCommand) {
			t.Errorf("%q: %v", in, err)
		}
	}
	for _, x := range []struct {
		in, want string
		open     func(int) (backend.Backend, error)
	}{
		{`{"bytes":4096,"sources":[{"export":{"Size":4095}}]}`, "an export of 4095 bytes from 0 on: want 4096", open},
		{`{"bytes":4096,"sources":[{"export":{"Size":8192,"Offset":4097}}]}`, "from 4097 on", open},
		{`{"bytes":4096,"sources":[{"export":{"Size":8192,"Offset":-1}}]}`, "from -1 on", open},
		{`{"bytes":4096,"sources":[{"from":1}]}`, "it imports no memory", func(int) (backend.Backend, error) { return backend.NewCPU(), nil }},
	} {
		var out bytes.Buffer
		var r pairResult
		if err := servePairs(t.Context(), strings.NewReader(x.in), &out, x.open); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(out.Bytes(), &r); err != nil || r.Fault == nil || !strings.Contains(r.Fault.Text, x.want) {
			t.Errorf("%s: %s, %v; want %q", x.in, out.Bytes(), err, x.want)
		}
	}
}

// TestExportRefused: a backend that cannot share memory is the reason for its pairs.
func TestExportRefused(t *testing.T) {
	m := saying(2, answerOf)
	m.OpenGPU = func(int) (backend.Backend, error) { return backend.NewCPU(), nil }
	if f := find(t, examine(t, m), "gpu 1 -> gpu 0"); f.Status != Warn || !strings.Contains(f.Text, "it shares no memory") || f.Remedy == "" {
		t.Errorf("%+v", f)
	}
}

func TestPattern(t *testing.T) {
	b := make([]byte, 4096)
	fillPattern(b, 7)
	if at := differs(b, 7); at != -1 {
		t.Errorf("differs at %d", at)
	}
	if at := differs(b, 8); at != 0 {
		t.Errorf("another seed differs at %d, want 0", at)
	}
	b[100]++
	if at := differs(b, 7); at != 96 {
		t.Errorf("differs at %d, want 96", at)
	}
}

func TestLastLine(t *testing.T) {
	if err := lastLine([]byte(" \n")); err != nil {
		t.Error(err)
	}
	if err := lastLine([]byte("the begin\nthe end\n")); err == nil || err.Error() != "the end" {
		t.Error(err)
	}
}

// TestChildEnded: lines that a child has written before it is ended are kept, but no incomplete line.
func TestChildEnded(t *testing.T) {
	x := &gpuExam{subject: &subject{m: &Machine{PairChild: func(ctx context.Context, request []byte) ([]byte, error) {
		return runChild(exec.CommandContext(ctx, "sh", "-c", `echo '{"from":1,"to":2}'; printf '{"from":3,"to":2}'; kill -9 $$`), request)
	}}}}
	got := map[int]pairResult{}
	if why := x.runPairChild(t.Context(), pairRequest{To: 2}, got); why != "the other process: signal: killed" {
		t.Errorf("%q", why)
	}
	if _, ok := got[1]; !ok || len(got) != 1 {
		t.Errorf("%+v", got)
	}
}
