package logx

// The text of attributes, values and messages in a line.

import (
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// appendAttr appends " key=value", or for a group one for each attribute. The names of the open groups precede the key.
func appendAttr(b []byte, group string, a slog.Attr) []byte {
	a.Value = a.Value.Resolve()
	if a.Equal(slog.Attr{}) {
		return b
	}
	if a.Value.Kind() == slog.KindGroup {
		if a.Key != "" {
			group += a.Key + "."
		}
		for _, m := range a.Value.Group() {
			b = appendAttr(b, group, m)
		}
		return b
	}
	b = append(b, ' ')
	if quoted(group) || quoted(a.Key) {
		b = strconv.AppendQuote(b, group+a.Key)
	} else {
		b = append(b, group...)
		b = append(b, a.Key...)
	}
	b = append(b, '=')
	return appendValue(b, a.Value)
}

func appendValue(b []byte, v slog.Value) []byte {
	switch v.Kind() {
	case slog.KindInt64:
		return strconv.AppendInt(b, v.Int64(), 10)
	case slog.KindUint64:
		return strconv.AppendUint(b, v.Uint64(), 10)
	case slog.KindFloat64:
		return strconv.AppendFloat(b, v.Float64(), 'g', -1, 64)
	case slog.KindBool:
		return strconv.AppendBool(b, v.Bool())
	case slog.KindDuration:
		return append(b, v.Duration().String()...)
	case slog.KindTime:
		return v.Time().AppendFormat(b, time.RFC3339Nano)
	case slog.KindString:
		return appendString(b, v.String())
	default:
		return appendString(b, fmt.Sprint(v.Any())) // a String method that panics does no harm
	}
}

func appendString(b []byte, s string) []byte {
	if s == "" || quoted(s) {
		return strconv.AppendQuote(b, s)
	}
	return append(b, s...)
}

// quoted reports whether s needs quotes to stay one word.
func quoted(s string) bool {
	for _, r := range s {
		if r == ' ' || r == '"' || r == '=' || r == utf8.RuneError || !unicode.IsPrint(r) {
			return true
		}
	}
	return false
}

// appendPlain appends a message, without characters that would break the line or disturb a terminal.
func appendPlain(b []byte, s string) []byte {
	for _, r := range s {
		switch {
		case r == '\t' || unicode.IsPrint(r):
			b = utf8.AppendRune(b, r)
		default:
			q := strconv.QuoteRune(r)
			b = append(b, q[1:len(q)-1]...)
		}
	}
	return b
}

// Printable replaces characters that must not be in a notice to another node or in a log line.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}
