// Package all links every transport of this build into the program, so that
// van.New finds them by name. The postoffice imports it; nobody else need.
package all

import (
	_ "github.com/stepaf/stepaf-go/van/zmq" // registers "zmq"
)
