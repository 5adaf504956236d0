package choose

import (
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
)

// Interfaces lists the network interfaces of this host.
func Interfaces() ([]Interface, error) { return hostaddr.Interfaces() }

// GPUAddress returns the PCI address of the NVIDIA GPU with that CUDA index, "" if it is not known. visible is CUDA_VISIBLE_DEVICES, and set
// whether that is set. It assumes that CUDA numbers GPUs in the order of PCI addresses, which is the case if the GPUs are equal or with
// CUDA_DEVICE_ORDER=PCI_BUS_ID. If CUDA is available, ask it instead.
func GPUAddress(root fs.FS, index int, visible string, set bool) string {
	if root == nil || index < 0 {
		return ""
	}
	if set {
		list := strings.Split(visible, ",")
		if index >= len(list) {
			return ""
		}
		n, err := strconv.Atoi(strings.TrimSpace(list[index]))
		if err != nil || n < 0 {
			return "" // a UUID, or no device
		}
		index = n
	}
	if gpus := gpus(root); index < len(gpus) {
		return gpus[index]
	}
	return ""
}

// gpus lists the GPUs by address: those of the driver, which in a container are the assigned ones, or else those in sysfs.
func gpus(root fs.FS) []string {
	var list []string
	dirs, _ := fs.ReadDir(root, "proc/driver/nvidia/gpus")
	for _, d := range dirs {
		if a, ok := normalizePCI(d.Name()); ok {
			list = append(list, a)
		}
	}
	if list == nil {
		l := &survey{m: Machine{Root: root}}
		dirs, _ := fs.ReadDir(root, "sys/bus/pci/devices")
		for _, d := range dirs {
			dir := l.link("sys/bus/pci/devices/" + d.Name())
			const nvidia, display = "0x10de", "0x03"
			if strings.TrimSpace(l.read(path.Join(dir, "vendor"))) == nvidia && strings.HasPrefix(l.read(path.Join(dir, "class")), display) {
				list = append(list, d.Name())
			}
		}
	}
	slices.Sort(list)
	return list
}
