#!/bin/sh
# Copy the chart library of package-lock.json into the console. npm checks the digests of the lock file.
# After an update: npm install --save-exact uplot@VERSION in this folder, then make vendor.
set -eu
cd "$(dirname "$0")"
npm ci --ignore-scripts --no-audit --no-fund
vendor=../../replaybuf/console/vendor
mkdir -p "$vendor"
cp node_modules/uplot/dist/uPlot.iife.min.js node_modules/uplot/dist/uPlot.min.css "$vendor"
cp node_modules/uplot/LICENSE "$vendor/uPlot.LICENSE.txt"
(cd "$vendor" && sha256sum uPlot.iife.min.js uPlot.min.css uPlot.LICENSE.txt > SHA256SUMS)
