package core

import (
	"encoding/json"
	"reflect"
	"strings"
	"unicode"
)

// Stats returns a snapshot of the session's node as a JSON object.
func Stats(s *Session) ([]byte, error) {
	all := s.node.Stats()
	apps, peers := []map[string]any{}, []map[string]any{}
	for _, a := range all.Apps {
		apps = append(apps, counters(reflect.ValueOf(a)))
	}
	for _, p := range all.Peers {
		peer := map[string]any{"id": p.ID, "node": p.ID.String(), "path": p.Path.Over, "why": p.Path.Why, "lost": nil, "silent_s": p.Silent.Seconds()}
		if p.Lost != nil {
			peer["lost"] = p.Lost.Error()
		}
		peers = append(peers, peer)
	}
	return json.Marshal(map[string]any{"id": s.node.ID(), "node": s.node.Name(), "apps": apps, "peers": peers, "counters": counters(reflect.ValueOf(all))})
}

// counters returns the integers in v, and in its structs, under names as Python writes them.
func counters(v reflect.Value) map[string]any {
	m := map[string]any{}
	for i := range v.NumField() {
		switch name, f := snake(v.Type().Field(i).Name), v.Field(i); f.Kind() {
		case reflect.Int, reflect.Uint64:
			m[name] = f.Interface()
		case reflect.Struct:
			m[name] = counters(f)
		}
	}
	return m
}

// snake writes a Go name with small letters and underscores: "AppID" is "app_id".
func snake(name string) string {
	var b strings.Builder
	for i, r := range name {
		if i > 0 && unicode.IsUpper(r) && unicode.IsLower(rune(name[i-1])) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}
