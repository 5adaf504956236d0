# Bytes per second of round trips, both directions added.
set terminal svg size 1000,420 dynamic font "DejaVu Sans,12" background "#fbfcfd"
set border lc rgb "#57606a"
set tics nomirror
set grid ytics lc rgb "#d0d7de" lt 1
set multiplot
set origin 0,0
set size 0.5,1
set title "host memory, one host"
set logscale x
set xlabel "bytes each way"
set ylabel "GB/s, both directions"
set xtics ("1 KiB" 1024, "16 KiB" 16384, "64 KiB" 65536, "1 MiB" 1048576, "16 MiB" 16777216)
set yrange [0:12]
set key top left Left reverse samplen 2
rate(b, us) = 2*b/us/1000
plot "performance.txt" index 0 using 1:(rate($1,$2)) with linespoints lw 2 pt 7 ps 0.5 lc rgb "#0969da" title "shared memory", \
     "" index 0 using 1:(rate($1,$4)) with linespoints lw 1.5 dt 2 pt 6 ps 0.5 lc rgb "#57606a" title "raw TCP", \
     "" index 0 using 1:(rate($1,$5)) with linespoints lw 1.5 dt 2 pt 6 ps 0.5 lc rgb "#8250df" title "bare libzmq", \
     "" index 0 using 1:(rate($1,$3)) with linespoints lw 2 pt 7 ps 0.5 lc rgb "#8250df" title "ZeroMQ (STEPAF\\_DATA=zmq)"
set origin 0.5,0
set title "GPU to GPU, two H200 with NVLink"
set xtics ("1 KiB" 1024, "attention" 1376256, "16 MiB" 16777216, "256 MiB" 268435456)
set yrange [0:450]
plot "performance.txt" index 2 using 1:(rate($1,$2)) with linespoints lw 1.5 dt 2 pt 6 ps 0.5 lc rgb "#57606a" title "floor: two copies", \
     "" index 2 using 1:(rate($1,$5)) with linespoints lw 2 pt 7 ps 0.5 lc rgb "#1a7f37" title "Python, prepared, by hosts", \
     "" index 2 using 1:(rate($1,$3)) with linespoints lw 2 pt 7 ps 0.5 lc rgb "#0969da" title "Go push\\_pull", \
     "" index 2 using 1:(rate($1,$6)) with linespoints lw 2 pt 7 ps 0.5 lc rgb "#cf222e" title "NCCL"
