# Where CUDA is, for make: CUDA_HOME, or NVIDIA's or Debian's place, or what
# "tools/install_deps.sh cuda" has fetched. The C compiler finds Debian's by itself; for
# others it gets options through the environment.
ifneq ($(USE_CUDA),0)
cuda_found := $(firstword $(wildcard $(addsuffix /include/cuda.h,$(or $(CUDA_HOME),/usr/local/cuda /usr build/cuda))))
cuda_dir := $(patsubst %/include/cuda.h,%,$(cuda_found))
# build/cuda is a directory of this checkout, whose path may have blanks.
cuda_path := $(if $(filter build/cuda,$(cuda_dir)),$(CURDIR)/build/cuda,$(cuda_dir))
ifneq ($(filter-out /usr,$(cuda_dir)),)
export CGO_CFLAGS := $(or $(CGO_CFLAGS),-g -O2) '-I$(cuda_path)/include'
export CGO_LDFLAGS := $(or $(CGO_LDFLAGS),-g -O2) '-L$(cuda_path)/lib64' '-L$(cuda_path)/lib64/stubs'
endif
endif
