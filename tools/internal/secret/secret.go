// Package secret creates secrets of clusters and writes them to files that nodes accept.
package secret

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/stepaf/stepaf-go/van/env"
)

// size is the number of random bytes in a secret.
const size = 32

// Make returns a new secret: 32 random bytes in base64url. A secret needs no quoting in a shell, a variable or a file.
func Make() string {
	var b [size]byte
	rand.Read(b[:]) // crypto/rand.Read never fails
	return base64.RawURLEncoding.EncodeToString(b[:])
}

// Write writes a secret and a newline to a new file at path, with mode 0600 independent of the umask. It returns an error
// if path exists, even as a link, and leaves it unchanged. It also returns an error if a node would refuse the file, for
// example because the file system stores no mode or owner. After an error no new file remains.
func Write(path, secret string) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%w: want the name of a new file; nodes that run still need the secret of an old one", err)
	}
	if err != nil {
		return err
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = e
		}
		if err != nil {
			os.Remove(path) // err is the cause
		}
	}()
	if err := f.Chmod(0o600); err != nil {
		return err
	}
	if _, err := f.WriteString(secret + "\n"); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	c := env.Default()
	c.SecretFile = path
	_, err = c.ReadSecret()
	return err
}
