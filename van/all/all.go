// Package all links every transport of this build into the program, so that
// van.New finds them by name. Only the postoffice needs to import it.
package all

import (
	_ "github.com/stepaf/stepaf-go/van/zmq" // registers "zmq"
)
