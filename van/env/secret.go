package env

// This file owns the cluster's secret: its sources, its checks, and the mode that decides
// whether peers must prove it.

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"syscall"
)

// Secret is a text that logs and error messages must not show: formatting it prints
// "(set)" or nothing. Convert it to a string to use it.
type Secret string

// String returns "(set)", or "" for an empty secret.
func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return "(set)"
}

// GoString is String for %#v.
func (s Secret) GoString() string { return s.String() }

// LogValue keeps the secret out of logs.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalText keeps the secret out of JSON.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// The modes of STEPAF_AUTH.
const (
	AuthOff     = "off"     // no node proves anything
	AuthWarn    = "warn"    // peers without proof are admitted, counted and logged
	AuthRequire = "require" // peers without proof are refused
)

// Limits of a secret's length, in bytes. A generated secret has 32 random bytes, as text.
const (
	MinSecret = 16
	MaxSecret = 4096
)

// HasSecret reports whether a secret is configured.
func (c *Config) HasSecret() bool { return c.Secret != "" || c.SecretFile != "" }

// AuthMode returns the mode in force: STEPAF_AUTH, or else "require" if a secret is
// configured and "off" if none is.
func (c *Config) AuthMode() string {
	switch {
	case c.Auth != "":
		return c.Auth
	case c.HasSecret():
		return AuthRequire
	}
	return AuthOff
}

// ReadSecret returns the configured secret without the white space around it, nil if none is configured. The
// file of STEPAF_SECRET_FILE must be a regular file that only its owner may access, and the owner must be the user of
// this process. Errors are an *Error and do not contain the secret.
func (c *Config) ReadSecret() ([]byte, error) {
	switch {
	case c.Secret != "" && c.SecretFile != "":
		return nil, &Error{Name: secretFile, Value: c.SecretFile, Why: secret + " is set too", Want: "only one of the two"}
	case c.Secret != "":
		b := bytes.Trim([]byte(c.Secret), blanks)
		if len(b) < MinSecret || len(b) > MaxSecret {
			return nil, &Error{Name: secret, Value: c.Secret.String(), Why: fmt.Sprintf("%d bytes", len(b)), Want: wantSecret}
		}
		return b, nil
	case c.SecretFile != "":
		b, why, want := readSecretFile(c.SecretFile)
		if want != "" {
			shown := c.SecretFile
			if _, err := os.Lstat(shown); err != nil && len(shown) >= MinSecret && !strings.ContainsAny(shown, "/.") {
				shown, want = "(not shown)", want+"; a secret belongs into STEPAF_SECRET, not its file's name"
			}
			return nil, &Error{Name: secretFile, Value: shown, Why: why, Want: want}
		}
		return b, nil
	}
	return nil, nil
}

const (
	secret     = "STEPAF_SECRET"
	secretFile = "STEPAF_SECRET_FILE"
	authMode   = "STEPAF_AUTH"
	tlsSwitch  = "STEPAF_TLS"
)

var wantSecret = fmt.Sprintf(`%d to %d bytes; "stepaf secret" makes one`, MinSecret, MaxSecret)

// readSecretFile returns the secret in the file at path. If the file is refused, why is the cause and want is the expectation.
func readSecretFile(path string) (b []byte, why, want string) {
	const readable = "a file that this process can read"
	// O_NONBLOCK: opening a named pipe without a writer must not wait.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		if pe := (*os.PathError)(nil); errors.As(err, &pe) {
			err = pe.Err
		}
		return nil, err.Error(), readable
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err.Error(), readable
	}
	if !st.Mode().IsRegular() {
		return nil, "a " + kindOf(st.Mode()), "a regular file"
	}
	if m := st.Mode().Perm(); m&0o077 != 0 {
		return nil, fmt.Sprintf("mode %04o", m), "mode 0600: other users must not be able to access it (chmod 600 " + path + ")"
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && int(sys.Uid) != os.Geteuid() {
		return nil, fmt.Sprintf("owned by user %d", sys.Uid), fmt.Sprintf("a file of user %d, who runs this process", os.Geteuid())
	}
	if b, err = io.ReadAll(io.LimitReader(f, MaxSecret+3)); err != nil { // a line end may follow
		return nil, err.Error(), readable
	}
	if b = bytes.Trim(b, blanks); len(b) < MinSecret || len(b) > MaxSecret {
		why = fmt.Sprintf("it holds %d bytes", len(b))
		if len(b) > MaxSecret {
			why = fmt.Sprintf("it holds more than %d bytes", MaxSecret)
		}
		return nil, why, wantSecret
	}
	return b, "", ""
}

// kindOf names the type of a file that is not a regular file.
func kindOf(m os.FileMode) string {
	switch {
	case m.IsDir():
		return "directory"
	case m&os.ModeNamedPipe != 0:
		return "named pipe"
	case m&os.ModeSocket != 0:
		return "socket"
	}
	return "device"
}

// validateSecret checks the secret, and that one is set if STEPAF_AUTH is warn or require.
func (c *Config) validateSecret(add func(*Error)) {
	if _, err := c.ReadSecret(); err != nil {
		if e := (*Error)(nil); errors.As(err, &e) {
			add(e)
		}
		return
	}
	if c.Auth != "" && c.Auth != AuthOff && !c.HasSecret() {
		add(&Error{Name: authMode, Value: c.Auth, Why: "no secret is set", Want: secretFile + ", or " + secret + `; "stepaf secret" makes one`})
	}
}

// validateTLS checks that no data is sent without encryption if STEPAF_TLS is 1. The secret must be required, since nodes that admit
// peers without a proof send them plaintext. The transport must not be RDMA, which has no encryption.
func (c *Config) validateTLS(add func(*Error)) {
	if !c.TLS {
		return
	}
	refuse := func(why, want string) { add(&Error{Name: tlsSwitch, Value: "1", Why: why, Want: want}) }
	switch {
	case !c.HasSecret():
		refuse("no secret is set", secretFile+", or "+secret+`; "stepaf secret" makes one`)
	case c.AuthMode() != AuthRequire:
		refuse(authMode+"="+c.Auth, authMode+"="+AuthRequire+", or unset it")
	}
	if c.VanType == "ibverbs" {
		refuse("transport ibverbs", enableRDMA+"=zmq: data over RDMA is not encrypted")
	}
}
