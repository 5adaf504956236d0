//go:build fserver

package main

// The addresses by which a forked child finds the node's sockets; see fork.c.

/*
#include <stdlib.h>
#include "abi.h"
*/
import "C"

import (
	"unsafe"

	"github.com/stepaf/stepaf-go/fserver/core"
)

func init() { process.OnSockets = publish }

func publish(s core.Sockets) {
	t := (*C.sf_sockets)(C.calloc(1, C.sizeof_sf_sockets+C.size_t(len(s.Peers))*C.sizeof_sf_address))
	t.n = C.int32_t(len(s.Peers))
	for i, port := range s.Ports[:min(len(s.Ports), len(t.ports))] {
		t.ports[i] = C.int32_t(port)
	}
	to := unsafe.Slice((*C.sf_address)(unsafe.Add(unsafe.Pointer(t), C.sizeof_sf_sockets)), len(s.Peers))
	for i, p := range s.Peers {
		to[i].port = C.int32_t(p.Port())
		if p.Addr().IsValid() {
			for k, b := range p.Addr().As16() {
				to[i].ip[k] = C.uint8_t(b)
			}
		}
	}
	C.sf_publish(t)
}
