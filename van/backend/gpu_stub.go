//go:build !cuda

package backend

import "fmt"

// noCUDA is what a build without CUDA says of the GPU backend.
const noCUDA = "built without CUDA; build with \"make af USE_CUDA=1\", see docs/gpu.md"

// missing says why a backend of this library is not in this build.
var missing = map[string]string{"GPU": noCUDA}

// GPUs describes the GPUs that this process sees, without opening any. A build without CUDA cannot list them, so
// the error wraps ErrUnavailable.
func GPUs() ([]Info, error) { return nil, fmt.Errorf("GPUs: %w: %s", ErrUnavailable, noCUDA) }
